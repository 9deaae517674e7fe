"""HumanEval and MBPP: the last Python code block with the function, and what it needs of others, are run
against the tests of the problem, in a sandbox, for 10 seconds (arXiv 2604.11035, H.4)."""

from __future__ import annotations

import ast
import os
import re
from typing import ClassVar

from idlm.errors import UserError
from idlm.infer.evaluation.extraction import function_block, statements
from idlm.infer.evaluation.file_tasks import FILE_TASKS, FileTask, Record, verdict_of
from idlm.infer.evaluation.sandbox import Program, Sandbox
from idlm.tasks import Grade

_FUTURE = re.compile(r"^from __future__ import (?:\([^)]*\)|.*)$", re.MULTILINE)
_IMPORT = re.compile(r"^(?:import|from) .*$", re.MULTILINE)


class CodeTask(FileTask):
    num_workers: ClassVar = max(1, os.cpu_count() or 1)
    sandbox: Sandbox

    @classmethod
    def load(cls, name: str, path: str, *, allow_code: bool) -> FileTask:
        """As for other tasks. UserError IDLM-0483 without `allow_code`, IDLM-0480 without a sandbox, and
        IDLM-0482 for tests that the right answer does not pass, which no other would."""
        if not allow_code:
            raise UserError(
                "IDLM-0483",
                f"task={name} runs programs that the model writes",
                fix="give allow_code=true: they run in a sandbox without network and without your files",
            )
        task = super().load(name, path, allow_code=allow_code)
        assert isinstance(task, CodeTask)
        task.sandbox = Sandbox()
        first = task.judge(task.records[0], f"```python\n{task.reference(task.records[0])}\n```")
        if not first.correct:
            raise UserError(
                "IDLM-0482",
                f"data={path!r}: its first problem's right answer does not pass its tests: {first.reason}",
                fix=f"give the published file of task={name}; tests have Python's own library, without numpy",
            )
        return task

    def judge(self, record: Record, response: str) -> Grade:
        code = function_block(response, self.wanted(record), stub=self.stub(record))
        if code is None:
            return verdict_of(is_correct=False, reason="no Python code block with a function")
        outcome = self.sandbox.run(self.program(record, code))
        return verdict_of(is_correct=outcome.passed, reason=outcome.reason)

    def wanted(self, record: Record) -> list[str]:
        """The names that the tests call."""
        raise AssertionError(record)

    def stub(self, record: Record) -> str:
        """Code that an answer may continue."""
        return ""

    def program(self, record: Record, code: str) -> Program:
        raise AssertionError(record)


@FILE_TASKS.register("humaneval")
class HumanEval(CodeTask):
    """164 functions to complete; pass@1."""

    fields: ClassVar = {"prompt": str, "test": str, "entry_point": str, "canonical_solution": str}

    def prompt(self, record: Record) -> str:
        question = "Complete this Python function. Answer with the whole function in one Python code block."
        return f"{question}\n```python\n{record['prompt'].strip()}\n```"

    def reference(self, record: Record) -> str:
        return f"{record['prompt']}{record['canonical_solution']}"

    def wanted(self, record: Record) -> list[str]:
        return [record["entry_point"]]

    def stub(self, record: Record) -> str:
        return str(record["prompt"])

    def program(self, record: Record, code: str) -> Program:
        """The problem's own imports and helpers come first, for the code and for the test."""
        stub, name = "candidate_function", record["entry_point"]
        before = record["prompt"].rpartition(f"def {name}(")[0]
        return Program(
            code=_after(before, code),
            test=f"{before}\n{record['test']}\ncheck({stub})",
            functions={stub: name, name: name},
        )


@FILE_TASKS.register("mbpp")
class Mbpp(CodeTask):
    """Short functions with three asserts each: problems 11 to 510, the test split (257 sanitized ones)."""

    fields: ClassVar = {"prompt|text": str, "code": str, "test_list": list, "task_id": int}

    @classmethod
    def prepared(cls, record: Record) -> Record | None:
        """Both published files: `prompt` and `test_imports`, or `text` and `test_setup_code`."""
        if not 11 <= int(record["task_id"]) <= 510:
            return None
        setup = filter(None, [*(record.get("test_imports") or ()), record.get("test_setup_code")])
        prompt = record.get("prompt", record.get("text"))
        return {**record, "prompt": prompt, "setup": "\n".join(setup)}

    def prompt(self, record: Record) -> str:
        tests = "\n".join(record["test_list"])
        return (
            f"You are an expert Python programmer, and here is your task: {record['prompt']} Your code "
            f"should pass these tests:\n\n{tests}\n\nAnswer with one Python code block."
        )

    def reference(self, record: Record) -> str:
        return str(record["code"])

    def wanted(self, record: Record) -> list[str]:
        tests = "\n".join(record["test_list"])
        return [name for name in defined_names(record["code"]) if re.search(rf"\b{name}\b", tests)]

    def program(self, record: Record, code: str) -> Program:
        """The tests reach the functions and classes of the reference, and no other name, such as the code's
        `set`. The code has the imports of the set-up, which may make objects of the code's classes."""
        test = "\n".join([record["setup"], *record["test_list"]])
        names = {name: name for name in defined_names(record["code"])}
        imports = "\n".join(_IMPORT.findall(record["setup"]))
        return Program(code=_after(imports, code), test=test, functions=names)


def _after(setup: str, code: str) -> str:
    """The code after `setup`, but its imports from `__future__` first, where they have to be."""
    return "\n".join([*_FUTURE.findall(code), setup, _FUTURE.sub("", code)])


def defined_names(code: str) -> list[str]:
    """Functions and classes of a module; none of a text that is no Python."""
    return [node.name for node in statements(code) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
