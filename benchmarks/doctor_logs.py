"""Score `tutti doctor logs` on failures of known cause, and time it on a gigabyte.

    python benchmarks/doctor_logs.py                 # all parts, beside a plain keyword match
    python benchmarks/doctor_logs.py --part first --misses
    python benchmarks/doctor_logs.py --manual        # single lines that manuals list
    python benchmarks/doctor_logs.py --gigabytes 1   # CPU seconds, memory; --loud, --packed

The halves are fixed by a hash of each case's source: signatures and confidences were made on the
first, then the second was scored once. What it taught was put in afterwards; the third part was
gathered then, to be scored once again, and so were the fourth to the eleventh.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import re
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from tutti.diagnose.finding import Component, Finding
from tutti.diagnose.logs.collect import collect
from tutti.diagnose.logs.reason import diagnose
from tutti.diagnose.logs.signatures import own_catalog

CASES = Path(__file__).parent / "doctor_cases"
MANUAL = Path(__file__).parent / "doctor_manual.yaml"
SURE = 0.8
PARTS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth",
         "tenth", "eleventh")  # fmt: skip
# What an engineer greps for first; the component with most lines wins.
KEYWORDS = {
    "chip": r"xid|ecc|nvrm|nvlink|amdgpu|gpu is lost|fallen off",
    "network": r"nccl|socket|connection|timed? ?out|network|infiniband|ibv_|mlx5|gloo",
    "host": r"oom|killed|sigkill|exitcode: -9|return code = -9|evicted",
    "storage": r"no space|quota|i/o error|input/output|disk|stale|checkpoint|s3",
    "configuration": r"out of memory|version|already in use|undefined symbol|permission|divisible",
    "software": r"error:|exception|assert|traceback|segmentation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A failure whose cause is known."""

    source: str
    component: str
    log: str
    rank: int | None = None
    host: str | None = None
    later: str = ""  # the part of a case that was gathered later

    @property
    def part(self) -> str:
        """Which part of the set it is of: signatures are made on the first half."""
        if self.later:
            return self.later
        even = int(hashlib.sha256(self.source.encode()).hexdigest(), 16) % 2 == 0
        return "first" if even else "second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well some cases were answered."""

    cases: int
    right: int
    keywords_right: int
    sure: int
    sure_wrong: int
    named: int
    named_right: int
    mean_confidence: float
    symptoms: int
    symptoms_undetermined: int
    told: int
    told_right: int


def cases() -> list[Case]:
    """Return all cases, checked."""
    found = []
    for path in sorted(CASES.glob("*.yaml")):
        for one in yaml.safe_load(path.read_text()):
            label = one.get("component", path.stem)
            found.append(
                Case(
                    source=one["source"], component=Component(label).value, log=one["log"],
                    rank=one.get("rank"), host=one.get("host"),
                    later=path.stem if path.stem in PARTS else "",
                )
            )  # fmt: skip
    if len({case.source for case in found}) != len(found):
        raise ValueError("a source stands twice")
    return found


def answered(case: Case, folder: Path) -> Finding:
    """Return the doctor's answer."""
    path = folder / "job.log"
    path.write_text(case.log)
    return diagnose(collect([path], own_catalog()))


def said(finding: Finding) -> str:
    """Return the component that an answer names; to call a failure healthy is wrong, too."""
    return "healthy" if finding.healthy else finding.component.value


def by_keywords(text: str) -> str:
    """Return the component whose words most lines have."""
    counts = Counter(
        {
            component: sum(
                bool(re.search(words, line, re.IGNORECASE)) for line in text.splitlines()
            )
            for component, words in KEYWORDS.items()
        }
    )
    component, count = counts.most_common(1)[0]
    return component if count else "undetermined"


def told_rightly(case: Case, finding: Finding) -> bool:
    """Whether rank and host are those of the case, and no others."""
    if case.rank is not None and finding.where.ranks != (case.rank,):
        return False
    return case.host is None or finding.where.hosts == (case.host,)


def score(of: Sequence[tuple[Case, Finding]]) -> Score:
    """Return how well cases were answered."""
    right = [case.component == said(finding) for case, finding in of]
    named = [
        (ok, finding.confidence)
        for ok, (_, finding) in zip(right, of, strict=True)
        if finding.component is not Component.UNDETERMINED
    ]
    sure = [ok for ok, confidence in named if confidence >= SURE]
    symptoms = [finding for case, finding in of if case.component == "undetermined"]
    told = [told_rightly(c, f) for c, f in of if c.rank is not None or c.host is not None]
    return Score(
        cases=len(of),
        right=sum(right),
        keywords_right=sum(by_keywords(case.log) == case.component for case, _ in of),
        sure=len(sure),
        sure_wrong=sum(not ok for ok in sure),
        named=len(named),
        named_right=sum(ok for ok, _ in named),
        mean_confidence=sum(c for _, c in named) / max(1, len(named)),
        symptoms=len(symptoms),
        symptoms_undetermined=sum(said(f) == "undetermined" for f in symptoms),
        told=len(told),
        told_right=sum(told),
    )


def print_score(name: str, of: Score) -> None:
    """Print a part's figures beside their bars."""

    def share(part: int, whole: int) -> str:
        return f"{part}/{whole} = {part / max(1, whole):.1%}"

    hit = of.named_right / max(1, of.named)
    print(f"\n{name}: {of.cases} cases")
    print(f"  component right          {share(of.right, of.cases):>18}   bar 80 %")
    print(f"  a plain keyword match    {share(of.keywords_right, of.cases):>18}")
    print(f"  wrong at ≥ {SURE}           {share(of.sure_wrong, of.sure):>18}   bar 5 %")
    print(
        f"  confidence, hit rate     {of.mean_confidence:.1%}, {hit:.1%} of {of.named}"
        f" = {100 * (of.mean_confidence - hit):+.1f} points   bar ± 10"
    )
    print(f"  symptoms undetermined    {share(of.symptoms_undetermined, of.symptoms):>18}")
    print(f"  rank or host             {share(of.told_right, of.told):>18}   bar 90 %")


def print_bins(of: Sequence[tuple[Case, Finding]]) -> None:
    """Print stated confidence against the hit rate, by tenths."""
    print("  stated       hit rate")
    for low in (0.0, 0.5, 0.6, 0.7, 0.8, 0.9):
        high = low + 0.1 if low else 0.5
        inside = [
            (c.component == f.component.value, f.confidence)
            for c, f in of
            if f.component is not Component.UNDETERMINED and low <= f.confidence < high
        ]
        if inside:
            mean = sum(x for _, x in inside) / len(inside)
            hit = sum(ok for ok, _ in inside)
            print(f"  {mean:.2f}         {hit}/{len(inside)} = {hit / len(inside):.2f}")


def manual_lines() -> list[Case]:
    """Return the lines of manuals, each a case whose source is the line itself."""
    return [
        Case(source=f"{family['layer']}: {line}", component=Component(label).value, log=line + "\n")
        for family in yaml.safe_load(MANUAL.read_text())
        for label, lines in family["lines"].items()
        for line in lines
    ]


def print_manual(*, misses: bool) -> None:
    """Print how many lines of manuals get the right component, by layer."""
    with tempfile.TemporaryDirectory() as folder:
        of = [(case, answered(case, Path(folder))) for case in manual_lines()]
    for part, words in (("first", "looked at"), ("second", "held out")):
        mine = [(c, f) for c, f in of if c.part == part]
        print_score(f"lines of manuals, {words}", score(mine))
        layers = Counter(c.source.split(":")[0] for c, _ in mine)
        right = Counter(c.source.split(":")[0] for c, f in mine if c.component == said(f))
        print("  " + ", ".join(f"{layer} {right[layer]}/{n}" for layer, n in layers.items()))
        for case, finding in mine if misses and part == "first" else []:
            if case.component != said(finding):
                print(f"- {case.component}; said {said(finding)} {finding.confidence:.2f}: "
                      f"{finding.cause}\n    {case.source}")  # fmt: skip


FAULT = "[rank0]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
QUIET = (
    "[2026-01-02 03:04:05] iteration {:>8}/ 900000 | elapsed time per iteration (ms): 812.4"
    " | lm loss: 2.1 | grad norm: 0.9 | timeout: none\n"
)
LOUD = (  # known ones, unknown ones and noise
    "node{0}:{1}:{1} [{0}] NCCL WARN NET/Socket : peer 10.0.0.{0}<{1}> failed: Connection reset\n",
    "[2026-01-02 03:04:05,{1}] [rank{0}] WARNING: gave up on shard {1} after {0} retries\n",
    "Jan  2 03:04:05 node{0} kernel: pcieport 0000:{1:04x}: AER: Corrected error received: {1}\n",
)


def gigabyte(gigabytes: float, *, loud: bool, packed: bool) -> None:
    """Time the doctor on a training log with a fault at its end, progress or trouble throughout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("rank_0.log.gz" if packed else "rank_0.log")
        lines = LOUD if loud else (QUIET,)
        block = "".join(
            line.format(i % 16, i) if loud else line.format(i)
            for i in range(20_000)
            for line in lines
        ).encode()
        form = gzip.compress if packed else bytes  # a gzip file may have many members
        part = form(block)
        with path.open("wb") as out:
            for _ in range(math.ceil(gigabytes * (1 << 30) / len(block))):
                out.write(part)
            out.write(form(FAULT.encode()))
        before = time.process_time()
        finding = diagnose(collect([path], own_catalog()))
        spent = time.process_time() - before
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kind = f"{' packed' if packed else ''}, {'loud' if loud else 'quiet'}"
    print(
        f"{gigabytes:g} GB{kind}: {finding.component.value}, "
        f"{spent:.1f} CPU s (bar 60 for 1 GB), {memory:.0f} MB (bar 300)"
    )


def main() -> None:
    """Score the parts, or time a gigabyte."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--misses", action="store_true", help="show the cases that were missed")
    parser.add_argument("--manual", action="store_true")
    parser.add_argument("--gigabytes", type=float, help="time a log of that size instead")
    parser.add_argument("--loud", action="store_true", help="of which every line is of trouble")
    parser.add_argument("--packed", action="store_true", help="by gzip")
    parser.add_argument("-o", "--output", type=Path, help="write the scores as JSON")
    arguments = parser.parse_args()
    if arguments.manual:
        print_manual(misses=arguments.misses)
        return
    if arguments.gigabytes:
        gigabyte(arguments.gigabytes, loud=arguments.loud, packed=arguments.packed)
        return
    every = cases()
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PARTS:
            if arguments.part not in (name, "all"):
                continue
            of = [(c, answered(c, Path(folder))) for c in every if c.part == name]
            scores[name] = score(of)
            print_score(f"{name} part", scores[name])
            print_bins(of)
            for case, finding in of if arguments.misses else []:
                if case.component != said(finding) or not told_rightly(case, finding):
                    print(
                        f"- {case.source}\n    {case.component} {case.rank} {case.host}; said "
                        f"{finding.component.value} {finding.confidence:.2f} "
                        f"{finding.where.words()}: {finding.cause}"
                    )
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({k: asdict(v) for k, v in scores.items()}, indent=1))


if __name__ == "__main__":
    main()
