"""What libraries print and log of their own accord: routine is for IDLM_LOG_LEVEL=DEBUG, the rest is told."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

from idlm.log import get_logger
from idlm.train.distributed.deepspeed import printing_to_log, route_library_output

BARRIER = "barrier(): using the device under current context. You can specify `device_id`"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What our handler writes; with the handler of a library on its logger, as DeepSpeed has one."""
    ours, library, text = get_logger(), logging.getLogger("DeepSpeed"), io.StringIO()
    handler, own = logging.StreamHandler(text), logging.StreamHandler(text)
    own.setFormatter(logging.Formatter("its own: %(message)s"))
    monkeypatch.setattr(ours, "handlers", [handler])
    monkeypatch.setattr(library, "handlers", [own])
    monkeypatch.setattr(library, "filters", list(library.filters))
    level = ours.level
    with warnings.catch_warnings():
        route_library_output()
        route_library_output()
        yield text
    ours.setLevel(level)


def test_a_library_logs_through_our_handler_once(shown: io.StringIO) -> None:
    library = logging.getLogger("DeepSpeed")
    library.warning(
        "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it."
    )
    logging.getLogger("accelerate.accelerator").warning(
        "[RANK 0] Gradient accumulation steps mismatch: 1, 8."
    )
    library.warning("%d parameters have no gradient", 3)
    library.error("the optimizer failed")
    assert shown.getvalue().splitlines() == ["3 parameters have no gradient", "the optimizer failed"]
    get_logger().setLevel(logging.DEBUG)
    library.warning("Setting ds_accelerator to cuda (auto detect)")
    assert "Setting ds_accelerator" in shown.getvalue()


def test_prints_are_kept_for_debugging(shown: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(value: int, *, other: int) -> int:
        print("begin bf16_optimizer\nMA 0.28 GB         Max_MA 0.28 GB")
        print("an error", file=sys.stderr)
        return value + other

    assert printing_to_log(prepare)(1, other=2) == 3
    assert shown.getvalue() == "" and capsys.readouterr() == ("", "an error\n")
    get_logger().setLevel(logging.DEBUG)
    printing_to_log(prepare)(1, other=2)
    assert shown.getvalue().splitlines() == ["begin bf16_optimizer", "MA 0.28 GB         Max_MA 0.28 GB"]
    with pytest.raises(TypeError):
        printing_to_log(prepare)(1)


def test_routine_warnings_are_left_out_and_no_others(shown: io.StringIO) -> None:
    with warnings.catch_warnings(record=True) as seen:
        for text in (
            BARRIER,
            "the data has many epochs",
            "OMP_NUM_THREADS/MKL_NUM_THREADS unset, we set it at 2",
        ):
            warnings.warn(text, UserWarning, stacklevel=1)
    assert [str(one.message) for one in seen] == ["the data has many epochs"]


@pytest.mark.sweep
def test_the_process_group_is_closed_at_the_end(tmp_path: object) -> None:
    """A process that opens one and returns, as a run with ZeRO on one GPU does."""
    program = (
        "from torch import distributed as dist\n"
        "from idlm.train.distributed.deepspeed import route_library_output\n"
        "destroy = dist.destroy_process_group\n"
        "dist.destroy_process_group = lambda: (print('closed'), destroy())\n"
        "route_library_output()\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
