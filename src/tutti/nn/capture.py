"""Blocks as compiled graphs, where the chip gains by it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tutti.accelerator.accelerator import Accelerator
from tutti.nn.model import Model

log = logging.getLogger(__name__)


def compile_blocks(model: Model, accelerator: Accelerator) -> int:
    """Compile the blocks; return how many. If one fails to compile, all run as they are.

    A chip that does not gain by it is left alone.
    """
    if not accelerator.gains_by_compiling:
        return 0
    fate = _Fate()
    for block in model.blocks:
        plain = block.forward
        block.forward = fate.guarded(plain, accelerator.compile(plain))  # type: ignore[method-assign]
    return len(model.blocks)


class _Fate:
    """Whether the blocks of a model run compiled; they all do, or none."""

    def __init__(self) -> None:
        self.compiled = True

    def guarded(
        self, plain: Callable[..., Any], compiled: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the compiled function, or the plain one after a failure."""

        def run(*args: Any, **options: Any) -> Any:
            if not self.compiled:
                return plain(*args, **options)
            try:
                return compiled(*args, **options)
            except Exception as error:
                outcome = plain(*args, **options)  # an error of the block itself goes on from here
                first = (str(error).strip().splitlines() or [""])[0]
                log.warning("blocks run uncompiled: %s: %s", type(error).__name__, first)
                self.compiled = False
                return outcome

        return run
