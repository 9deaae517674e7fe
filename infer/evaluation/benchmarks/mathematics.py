r"""GSM8K and MATH-500: the last `\boxed{...}` after the thinking is the answer (arXiv 2604.11035, H.4), and
math-verify compares it with the right one."""

from __future__ import annotations

from typing import ClassVar

from idlm.infer.evaluation.extraction import boxed, same_answer
from idlm.infer.evaluation.file_tasks import FILE_TASKS, FileTask, Record, verdict_of
from idlm.infer.evaluation.mathematics.equality import require_math_verify
from idlm.tasks import Grade

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


class _BoxedTask(FileTask):
    problem: ClassVar[str]

    @classmethod
    def load(cls, name: str, path: str, *, allow_code: bool) -> FileTask:
        """As for other tasks. UserError IDLM-0488 without math-verify."""
        require_math_verify()
        return super().load(name, path, allow_code=allow_code)

    def prompt(self, record: Record) -> str:
        return f"{record[self.problem]}\n{INSTRUCTION}"

    def judge(self, record: Record, response: str) -> Grade:
        given, expected = boxed(response), self.reference(record)
        if given is None:
            return verdict_of(is_correct=False, reason="no \\boxed{} answer")
        reason = f"answered {given!r}, expected {expected!r}"
        return verdict_of(is_correct=same_answer(given, expected), reason=reason)


@FILE_TASKS.register("gsm8k")
class Gsm8k(_BoxedTask):
    """Grade-school word problems; the answer of a record follows `####`."""

    problem = "question"
    fields: ClassVar = {"question": str, "answer": str}
    marks: ClassVar = {"answer": "####"}

    def reference(self, record: Record) -> str:
        return str(record["answer"]).rpartition(self.marks["answer"])[2].strip()


@FILE_TASKS.register("math500")
class Math500(_BoxedTask):
    """500 problems of competitions; answers are LaTeX."""

    problem = "problem"
    fields: ClassVar = {"problem": str, "answer": str}

    def reference(self, record: Record) -> str:
        return str(record["answer"])
