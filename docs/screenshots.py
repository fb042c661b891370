"""The pictures of the documentation: pages of tutti as a browser shows them, into docs/images.

`make screenshots` runs the quickstart first, whose pages are taken; the page of an alignment is
made here. Needs chromium, torch and transformers. Pillow, if it is there, makes the files smaller.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browser import Browser  # noqa: E402

MOST_BYTES = 200_000
TWO_MODELS = """
import torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=160,
    num_attention_heads=8, num_key_value_heads=2, pad_token_id=0,
)
model = transformers.LlamaForCausalLM(config)
model.save_pretrained("right")
with torch.no_grad():
    model.model.layers[2].mlp.up_proj.weight[5, 7] += 1
model.save_pretrained("wrong")
"""


def main(quickstart: Path, images: Path) -> None:
    """Take every picture from the pages of a quickstart."""
    if "do not count" in (quickstart / "report.html").read_text(encoding="utf-8"):
        sys.exit(
            f"{quickstart}: the machine fell behind the emulated chips; run it again when idle"
        )
    images.mkdir(parents=True, exist_ok=True)
    run = quickstart / "planned"
    over, align = quickstart / "over.html", quickstart / "align.html"
    command("tutti", "simulate", str(run / "plan.json"), "--over", str(run / "trace-step-2.json"),
            "--html", str(over))  # fmt: skip
    command(sys.executable, "-c", TWO_MODELS, folder=quickstart)
    command(
        "tutti", "align", "right", "wrong", "--html", "align.html", folder=quickstart, fine=(0, 1)
    )
    with Browser() as browser:
        for name, page, size in (
            ("plan", quickstart / "plan.html", (1280, 1080)),
            ("step", quickstart / "step.html", (1280, 850)),
            ("report", quickstart / "report.html", (1280, 940)),
            ("overlay", over, (1280, 960)),
            ("align", align, (1280, 860)),
            ("phone", quickstart / "plan.html", (390, 844)),
        ):
            browser.open(page, *size)
            if name == "plan":  # the plan against its rivals belongs on the first picture
                browser.value("document.querySelector('.lead').remove()")
            (images / f"{name}.png").write_bytes(small(browser.picture(), name))


def command(*words: str, folder: Path = ROOT, fine: tuple[int, ...] = (0,)) -> None:
    """Run a command; `tutti align` ends with 1 where two sides diverge, as they should here."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(words, cwd=folder, env={**os.environ, "PATH": path}, timeout=300)
    if done.returncode not in fine:
        sys.exit(f"{' '.join(words[:3])} …: exit code {done.returncode}")


def small(picture: bytes, name: str) -> bytes:
    """Return a picture of few bytes: 128 colours are enough for pages."""
    try:
        from PIL import Image
    except ImportError:
        pass
    else:
        made = io.BytesIO()
        image = Image.open(io.BytesIO(picture)).convert("RGB")
        image.quantize(128, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
        picture = min(picture, made.getvalue(), key=len)
    if len(picture) > MOST_BYTES:
        sys.exit(f"{name}.png: {len(picture):,} bytes, more than {MOST_BYTES:,}; install Pillow")
    return picture


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), ROOT / "docs/images")
