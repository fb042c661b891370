"""A process that tokenises: the work on the first line, then a task per line, an answer per task.

Started by `tokenise`. An answer is an empty object, or what went wrong.
"""

from __future__ import annotations

import json
import sys

from tutti.document import Place, build
from tutti.errors import InputError
from tutti.huggingface.tokenizer import open_tokenizer
from tutti.train.data.tokenise import Task, Work, do_task


def _answer(work: Work, line: str) -> dict[str, object]:
    try:
        task = build(Task, json.loads(line), Place("task"))
        do_task(work, task, open_tokenizer(work.tokenizer))
    except InputError as error:
        return {"message": str(error)}
    except OSError as error:
        return {"message": error.strerror or str(error), "errno": error.errno or 5}
    return {}


def main() -> None:
    """Do tasks until there are no more."""
    work = build(Work, json.loads(sys.stdin.readline()), Place("work"))
    for line in sys.stdin:
        print(json.dumps(_answer(work, line)), flush=True)


if __name__ == "__main__":
    main()
