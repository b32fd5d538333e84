"""One bar in a terminal, some lines elsewhere, and the time that is left."""

import io
import itertools
from contextlib import contextmanager, redirect_stderr

import pytest
from transformers.utils import logging

from hf_vq import VQConfig, progress
from hf_vq.hf.quantize_op import advice
from hf_vq.progress import Progress, bar
from tests.fixtures.checkpoints import LOAD


class Stream(io.StringIO):
    """What stderr is: a terminal, or a file."""

    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@contextmanager
def stderr(terminal=False):
    """What is written to stderr meanwhile; bars are on, which conftest.py turns off."""
    logging.enable_progress_bar()
    try:
        with redirect_stderr(Stream(terminal)) as stream:
            yield stream
    finally:
        logging.disable_progress_bar()


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by `step` seconds whenever it is read."""
    times = itertools.count(1000.0, 5.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))


def test_a_terminal_shows_one_bar_while_a_model_is_quantized(dense):
    """Break of a survey: Transformers' bar and ours took turns."""
    folder = dense("llama")
    with stderr(terminal=True) as stream:
        LOAD(folder, quantization_config=VQConfig(activations=None))
        shown = stream.getvalue()
        LOAD(folder)
    assert "Loading weights" not in shown and "Quantizing to vq-4:   0%" in shown
    assert "\n" not in shown  # tqdm goes up and down lines where there are two bars
    assert "Loading weights: 100%" in stream.getvalue()


def test_a_pass_over_tokens_shows_its_bars_after_the_loader(dense):
    with stderr(terminal=True) as stream:
        LOAD(dense("llama"), quantization_config=VQConfig())
    shown = stream.getvalue()
    ends = [shown.rindex(label) for label in ("Loading weights", "writing text", "Quantizing")]
    starts = [shown.index(label) for label in ("writing text", "Quantizing to vq-4:   0%")]
    assert ends[0] < starts[0] < ends[1] < starts[1] < ends[2]


def test_a_load_that_failed_takes_no_bar_of_the_next():
    shown = Progress("mine", 3)
    shown.replace_loaders_bar()
    del shown
    with stderr() as stream:
        for _ in range(2):
            assert list(logging.tqdm([1, 2], desc="Loading weights")) == [1, 2]
    assert stream.getvalue().count("100%") == 2 and logging._tqdm_hook is None


def test_a_file_gets_a_line_for_each_tenth_at_most(clock):
    """Before, each layer was two lines."""
    with stderr() as stream:
        assert list(bar(range(200), "fitting", True)) == list(range(200))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[0] == "fitting: 10 %, 15 minutes left"
    assert lines[-1] == "fitting: 100 %"


def test_a_file_gets_a_line_a_second_at_most():
    with stderr() as stream:
        assert list(bar(range(50), "fitting", True)) == list(range(50))
        assert list(bar(range(50), "fitting", False)) == list(range(50))
    assert stream.getvalue() == ""


def test_bars_that_are_off_are_lines_that_are_off(clock):
    with stderr() as stream:
        logging.disable_progress_bar()
        assert list(bar(range(50), "fitting", True)) == list(range(50))
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("amount", "said"), [(10, True), (100, False)])
def test_the_first_part_says_how_long_all_take(monkeypatch, clock, amount, said):
    told = []
    monkeypatch.setattr(progress.logger, "warning", lambda text, *given: told.append(text % given))
    shown = Progress("Quantizing to aqlm-3", 1000, "Use vq-3.")
    for size in (amount, amount):
        shown.start("a layer", size)
        shown.done()
    estimate = "hf_vq: Quantizing to aqlm-3: 8 minutes left, by the time that the first part took."
    assert told == [f"{estimate} Use vq-3."] * said


def test_parts_that_were_done_before_say_nothing_of_the_time_left(clock):
    shown = Progress("Calibrating", 100)
    shown.skip(90)
    with stderr() as stream:
        for _ in range(10):
            shown.start("")
            shown.done()
    assert stream.getvalue() == "Calibrating: 100 %\n"


@pytest.mark.parametrize(
    ("scheme", "other"),
    [
        ("aqlm-3", "vq-3"),
        ("aqlm-2", "vq-2"),
        ("gptvq-2", "vq-2"),
        ("vq-3", None),
        ("qoq-w4a8", None),
    ],
)
def test_schemes_that_learn_codebooks_take_long(scheme, other):
    said = advice([VQConfig("vq-4").vq_scheme, VQConfig(scheme, calibration="model").vq_scheme])
    learns = (
        f"{scheme} learns codebooks for every layer; {other} has ready ones, and is far faster."
    )
    assert said == (learns if other else "")
