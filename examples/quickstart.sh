#!/bin/sh
# The loop as far as it is built: describe the hardware and a model, search the best plan for a
# mixed cluster, prove that its schedule cannot hang, ask what a lost node would cost, report.
# Run by `make quickstart`; needs `tutti` on PATH.
set -eu
out=${1:-out/quickstart}
mkdir -p "$out"
job='--sequence-length 2048 --global-batch 128'

say() { printf '\n\033[1m%s\033[0m\n$ %s\n' "$1" "$2"; sh -c "$2"; }

say '1. This machine' 'tutti cluster show --here'
say '2. A mixed cluster, as a file describes it' 'tutti cluster show small-mixed'
say '3. A model, from its Hugging Face config' 'tutti model show llama-3.2-1b'
say '4. The best plan for all of it, and how far from the best it can be at most' \
  "tutti plan llama-3.2-1b small-mixed $job -o $out/plan.json --html $out/plan.html"
say '5. The plan, checked, and the proof that its schedule cannot hang' \
  "tutti show $out/plan.json --schedule --most 12 | tail -n 22"
say '6. How long a step takes, how much memory it needs, where the time goes' \
  "tutti predict $out/plan.json"
say '7. One step, instruction by instruction, as a page and as a trace' \
  "tutti simulate $out/plan.json --html $out/step.html --trace $out/step.trace.json"
say '8. A node is lost: what to run now, what must move, when it pays back' \
  "tutti plan llama-3.2-1b small-mixed --replan-from $out/plan.json --what-if '-node a100/1' \
    -o $out/next.json | tail -n 16"
printf '\nOpen %s in a browser: the plan on the cluster, over time, against its rivals.\n' \
  "$out/plan.html"
printf 'The plan is in %s. Next: docs/start.md\n' "$out/plan.json"
