#!/bin/sh
# The whole loop on this machine: describe the hardware and a model, plan for a mixed cluster,
# measure this machine, train a small model on fast and slow emulated chips as planned and in the
# usual uniform way, and report. Run by `make quickstart`; needs `tutti` on PATH, and torch.
set -eu
out=${1:-out/quickstart}
here=$(dirname "$0")
mkdir -p "$out"
steps=${STEPS:-20} few=${FEW:-6} budget=${BUDGET:-45s}  # less of everything, for tests
job='--sequence-length 2048 --global-batch 128'
train="tutti train $here/train/laptop.yaml --set job.chip_profiles=[$out/cpu.json]"

say() { printf '\n\033[1m%s\033[0m\n$ %s\n' "$1" "$2"; sh -c "$2"; }

say '1. This machine' 'tutti cluster show --here'
say '2. A mixed cluster, as a file describes it' 'tutti cluster show small-mixed'
say '3. The best plan for a model on it, and how far from the best it can be at most' \
  "tutti plan llama-3.2-1b small-mixed $job -o $out/plan.json --html $out/plan.html"
say '4. One step of it, instruction by instruction, as a page and as a trace' \
  "tutti simulate $out/plan.json --html $out/step.html --trace $out/step.trace.json"
say '5. A node is lost: what to run now, what must move, when it pays back' \
  "tutti plan llama-3.2-1b small-mixed --replan-from $out/plan.json --what-if '-node a100/1' \
    -o $out/next.json | tail -n 16"
say '6. Now for real: how fast is this machine?' \
  "tutti profile $here/train/small-llama --device cpu --budget $budget --tokens 128,512 \
    --sequence-length 128 -o $out/cpu.json | tail -n 4"
say '7. Train on two fast and two slow emulated chips, as planned' \
  "$train --steps $steps -o $out/planned --trace 2"
say '8. The same with all chips treated alike' \
  "$train --steps $few -o $out/uniform --set job.uniform=true --set validation.every=0 \
    --set checkpoints.final=false"
say '9. Planned against uniform, predicted against measured' \
  "tutti report planned=$out/planned uniform=$out/uniform --html $out/report.html"
printf '\nOpen %s in a browser: losses, speed, and where each pool spends its time.\n' \
  "$out/report.html"
printf 'The plan of the large cluster is drawn in %s. Next: docs/start.md\n' "$out/plan.html"
