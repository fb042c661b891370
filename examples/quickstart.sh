#!/bin/sh
# The whole loop on this machine: describe the hardware and a model, plan for a mixed cluster,
# measure this machine, learn from a short run, train a small model on fast and slow emulated chips
# as planned and in the usual uniform way, report, and serve what was trained. Run by `make quickstart`; needs `tutti` on PATH, and torch.
set -eu
out=${1:-out/quickstart}
here=$(dirname "$0")
mkdir -p "$out"
steps=${STEPS:-20} few=${FEW:-6} budget=${BUDGET:-25s}  # less of everything, for tests
port=${PORT:-8417}
more="--cluster ${CLUSTER:-laptop} --set job.global_batch=${BATCH:-16}"
job="--sequence-length 2048 --global-batch ${SEQUENCES:-128} ${SPACE:-}"
train="tutti train $here/train/laptop.yaml --overwrite $more --set job.chip_profiles="
short="--set validation.every=0 --set checkpoints.final=false"

say() { printf '\n\033[1m%s\033[0m\n$ %s\n' "$1" "$2"; sh -c "$2"; }

say '1. This machine' 'tutti cluster show --here'
say '2. A mixed cluster, as a file describes it' 'tutti cluster show small-mixed'
say '3. The best plan for a model on it, and how far from the best it can be at most' \
  "tutti plan llama-3.2-1b small-mixed $job -o $out/plan.json --html $out/plan.html"
say '4. One step of it, instruction by instruction, as a page and as a trace' \
  "tutti simulate $out/plan.json --html $out/step.html --trace $out/step.trace.json"
say '5. A node is lost: what to run now, what must move, when it pays back' \
  "tutti plan llama-3.2-1b small-mixed --replan-from $out/plan.json --what-if '-node a100/1' \
    ${SPACE:-} -o $out/next.json | tail -n 16"
say '6. Now for real: how fast is a core of this machine? (a chip of step 7 is a part of one)' \
  "tutti profile $here/train/small-llama --device cpu --threads 1 --budget $budget --tokens 128,512 \
    --sequence-length 128 -o $out/cpu.json | tail -n 4"
say '7. Six steps on two fast and two slow emulated chips, the last four traced' \
  "$train[$out/cpu.json] --steps 6 -o $out/first --trace 3 --trace 4 --trace 5 --trace 6 $short"
say '8. A whole step takes longer than its operators one by one: learn by how much, on each chip' \
  "tutti validate --run $out/first --pool fast -o $out/fast.json
   tutti validate --run $out/first --pool slow -o $out/slow.json | tail -n 1"
say "9. Plan with what was learnt, and train for $steps steps" \
  "$train[$out/fast.json,$out/slow.json] --steps $steps -o $out/planned --trace 2"
say "10. The same with all chips treated alike, for $few steps: enough to know how fast they are" \
  "$train[$out/fast.json,$out/slow.json] --steps $few -o $out/uniform --set job.uniform=true $short"
say "11. Planned against uniform, predicted against measured; losses compare at step $few" \
  "tutti report planned=$out/planned uniform=$out/uniform --html $out/report.html"
say '12. A slow chip among eight emulated ones of two kinds: found by the check of real ones' \
  'tutti doctor --rehearse || true  # 1: found; a busy machine may hide it'
say '13. The dashboard of both runs, saved as one page (tutti dashboard FOLDER… shows it live)' \
  "tutti dashboard planned=$out/planned uniform=$out/uniform --save $out/dashboard.html"
say '14. Serve what was trained by OpenAI'"'"'s interface, for a moment, and ask it' \
  "tutti serve $out/planned/huggingface --tokenizer bytes --name tales --port $port & server=\$!
   python $here/ask.py http://127.0.0.1:$port 'Once upon a time'; asked=\$?
   kill \$server; wait \$server; exit \$asked"
printf '\nOpen %s in a browser: losses, speed, and where each pool spends its time.\n' \
  "$out/report.html"
printf 'The plan of the large cluster is drawn in %s. Next: docs/start.md\n' "$out/plan.html"
