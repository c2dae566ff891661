"""A format of tasks: a question and its answer a line, with a tab between."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from nano_rl.task_formats import ReadOptions
from nano_shared.errors import Refusal, Refused
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.types import Task


class Quiz:
    name = "quiz"
    summary = "a question, a tab and its answer on each line"

    def read(self, path: Path, options: ReadOptions) -> Iterator[Task | Refusal]:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            question, tab, answer = line.partition("\t")
            if not tab:
                yield Refusal.of(f"{path}:{number}", Refused("line", "holds no tab"))
                continue
            hidden = AnswerChecks(answer=answer)
            yield Task(key=f"quiz:{question}", prompt=question, tools=("submit",), hidden=hidden)

    def refusals(self, tasks: Sequence[Task]) -> list[Refusal]:
        wrong = Refused("hidden", "is no answer, and a quiz holds nothing else")
        return [Refusal.of(t.key, wrong) for t in tasks if not isinstance(t.hidden, AnswerChecks)]

    def write(self, tasks: Sequence[Task], path: Path) -> None:
        rows = [
            f"{task.prompt}\t{task.hidden.answer}\n"
            for task in tasks
            if isinstance(task.hidden, AnswerChecks)
        ]
        path.write_text("".join(rows))


QUIZ = Quiz()
