"""The verbs as `tutti --help` lists them: by what they are for, in the order of the loop."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

SECTIONS: dict[str, dict[str, str]] = {
    "What is known": {
        "chips": "the chip catalog, each figure with its source",
        "cluster": "clusters: what you own, drawn",
        "model": "what a config.json says; averaged, grown, stretched models",
        "show": "a plan drawn, checked, proven free of deadlocks",
    },
    "Measure": {
        "profile": "operators, memory, links and disks of this machine",
        "accelerator": "devices of this machine; are their operators right?",
        "calibrate": "constants of the cost model from measured runs",
        "validate": "predictions against measured runs",
    },
    "Plan": {
        "plan": "search the best plan for a model on a cluster",
        "predict": "time, memory and MFU of a plan's step, and why",
        "simulate": "one step of a plan, instruction by instruction",
        "launch": "files that start a plan: torchrun, Slurm, Kubernetes, ssh",
    },
    "Train": {
        "train": "train by a plan, here or as a rank of a launcher",
        "recipe": "training files that work as they are",
        "data": "what training data become: text, tokens, masks",
        "evaluate": "multiple choice and perplexity of a model",
        "report": "losses, speed and where the time went",
    },
    "Serve": {
        "serve": "OpenAI's interface over a model, on one chip or by a plan",
        "generate": "go on with prompts, all of them together",
    },
    "Watch and adapt": {
        "doctor": "what is wrong, where, and what to do",
        "dashboard": "runs, chips and links as they are right now",
        "job": "elastic runs: status, drain, add, plan anew",
        "agent": "bring this host's chips into an elastic job",
    },
    "Network and fleet": {
        "fabric": "design, simulate, probe and watch the network",
        "fleet": "several jobs on one cluster",
        "comm": "collectives across unlike chips, explained and tried",
    },
    "Formats and figures": {
        "convert": "weights to and from Hugging Face's files, bit for bit",
        "align": "one batch through two sides: where do they part?",
        "bench": "the benchmarks behind docs/results.md",
    },
}


class LoopGroup(TyperGroup):
    """Lists the verbs in sections, one line each."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the sections."""
        del ctx
        return [name for verbs in SECTIONS.values() for name in verbs if name in self.commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections."""
        del ctx
        wide = max(len(name) for verbs in SECTIONS.values() for name in verbs)
        for title, verbs in SECTIONS.items():
            rows = [(f"{name:{wide}}", words) for name, words in verbs.items()]
            with formatter.section(title):
                formatter.write_dl(rows)
