#!/bin/sh
# The loop as far as it is built: describe the hardware and a model, lay a plan over a mixed
# cluster, prove that its schedule cannot hang, predict and simulate a step, write a report.
# Run by `make quickstart`; needs `tutti` on PATH.
set -eu
out=${1:-out/quickstart}
mkdir -p "$out"

say() { printf '\n\033[1m%s\033[0m\n$ %s\n' "$1" "$2"; sh -c "$2"; }

say '1. This machine' 'tutti cluster show --here'
say '2. A mixed cluster, as a file describes it' 'tutti cluster show small-mixed'
say '3. A model, from its Hugging Face config' 'tutti model show llama-3.2-1b'
say '4. A uniform plan over all 32 chips of three makers' \
  "tutti plan llama-3.2-1b small-mixed --uniform tp=2,pp=4,sp=1,shard=1 -o $out/plan.json"
say '5. The plan, checked, and the proof that its schedule cannot hang' \
  "tutti show $out/plan.json --schedule --most 12 | tail -n 22"
say '6. How long a step takes, how much memory it needs, where the time goes' \
  "tutti predict $out/plan.json"
say '7. One step, instruction by instruction, as a page and as a trace' \
  "tutti simulate $out/plan.json --html $out/step.html --trace $out/step.trace.json"
printf '\nOpen %s in a browser. The plan is in %s. Next: docs/start.md\n' \
  "$out/step.html" "$out/plan.json"
