"""Slots under streams that run whenever they may: a missing event is a wrong result here."""

import gc
import random
import threading
import weakref
from collections import deque
from contextlib import contextmanager

import pytest
import torch

from hf_vq.nn.offload_buffers import Served, Slots


class Event:
    done = False


class Simulated:
    """A device whose streams do their work later, in any order that events allow."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)
        self.streams = {"copy": deque(), "a": deque(), "b": deque()}
        self.current = "a"
        self.copies = 0

    def check(self):
        pass

    def empty(self, nbytes):
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def copy(self, pairs, after, old):
        event, stream = Event(), self.streams["copy"]
        stream.extend(("wait", one) for one in after)
        stream.extend(
            ("run", lambda to=to, source=source: to.copy_(source)) for to, source in pairs
        )
        stream.append(("record", event))
        self.copies += 1
        return event

    def wait(self, event):
        self.streams[self.current].append(("wait", event))

    def mark(self, memory, used):
        event = used[self.current] = Event()
        self.streams[self.current].append(("record", event))

    def compute(self, work):
        """Launch `work` on the current stream."""
        self.streams[self.current].append(("run", work))

    def step(self):
        """One piece of work of any stream that need not wait; False if there is none."""
        ready = [s for s in self.streams.values() if s and (s[0][0] != "wait" or s[0][1].done)]
        if not ready:
            assert not any(self.streams.values()), "streams wait for each other"
            return False
        kind, what = self.random.choice(ready).popleft()
        if kind == "run":
            what()
        elif kind == "record":
            what.done = True
        return True

    def some_steps(self):
        for _ in range(self.random.randrange(12)):
            self.step()

    def finish(self):
        while self.step():
            pass


class Layer:
    """Codes and scales of a size and content of its own."""

    def __init__(self, number, size=40):
        self.tensors = [
            torch.full((3, size), number, dtype=torch.uint8),
            torch.full((5,), number, dtype=torch.float16),
        ]
        self.served = Served(self)

    def sources(self):
        return self.tensors


class Run:
    """Layers called on a simulated device; what each read is checked at the end."""

    def __init__(self, seed, layers=6, sizes=None):
        self.device = Simulated(seed)
        self.slots = Slots(self.device)
        sizes = sizes or [40 + 7 * number for number in range(layers)]
        self.layers = [Layer(number, size) for number, size in enumerate(sizes, 1)]
        self.read = []

    @contextmanager
    def lent(self, layer, **options):
        place = self.slots.lend(layer.served, layer.tensors, **options)
        try:
            yield place.views
        finally:
            self.slots.give_back(place)

    def expect(self, layers):
        self.slots.expect([layer.served for layer in layers])

    def call(self, layer, within=lambda: None, **options):
        expected = [tensor.clone() for tensor in layer.tensors]
        with self.lent(layer, **options) as here:
            within()
            self.device.compute(
                lambda: self.read.append(
                    all(torch.equal(a, b) for a, b in zip(here, expected, strict=True))
                )
            )
        self.device.some_steps()

    def check(self, calls):
        self.device.finish()
        assert len(self.read) == calls and all(self.read)


@pytest.mark.parametrize("seed", range(8))
def test_layers_in_order(seed):
    run = Run(seed)
    for _ in range(4):
        for layer in run.layers:
            run.call(layer)
    run.check(24)
    # Each in its first pass; from the second on the one before it has asked for it, and the last
    # one for the first.
    assert (run.slots.misses, run.slots.hits) == (7, 17)
    assert run.device.copies == 24 + 1  # the last one's expectation
    assert run.slots.nbytes == 2 * (256 + 256)  # two of the largest


def test_a_known_order_misses_once():
    run = Run(0)
    run.expect(run.layers)
    for layer in run.layers * 3:
        run.call(layer)
    run.check(18)
    assert run.slots.misses == 1


@pytest.mark.parametrize("sizes", [[40] * 4 + [80] * 3 + [700] * 3, [40, 10, 10, 40, 700, 700] * 3])
def test_smaller_slots_are_not_kept(sizes):
    run = Run(0, sizes=sizes)
    made, empty = [], run.device.empty
    run.device.empty = lambda nbytes: made.append(weakref.ref(found := empty(nbytes))) or found
    for layer in run.layers * 3:
        run.call(layer)
    larger = Layer(99, 2 * max(sizes) + 256)
    for _ in range(6):  # over all others, who do not ask again
        run.call(larger)
    run.check(3 * len(sizes) + 6)
    run.device.streams.clear()
    gc.collect()
    assert len(made) > 1 and [one() is not None for one in made] == [False] * (len(made) - 1) + [
        True
    ]


UNEQUAL = [40, 47, 300, 90, 700, 61]  # places overlap others in part


@pytest.mark.parametrize("seed", range(20))
def test_small_layers_are_copied_ahead(seed):
    """As many as a slot holds: nobody waits for a copy that could have begun before."""
    run = Run(seed, sizes=UNEQUAL)
    run.expect(run.layers)
    for layer in run.layers:  # the slots grow
        run.call(layer)
    misses, ahead = run.slots.misses, []
    slot = run.slots.nbytes // 2
    for layer in run.layers * 4:
        run.call(layer)
        coming = run.slots._coming
        ahead.append(len(coming))
        assert sum(place.end - place.start for place in coming) <= slot
    run.check(30)
    assert run.slots.misses == misses
    assert min(ahead) == 1 and max(ahead) > 2


@pytest.mark.parametrize("seed", range(10))
def test_experts_leave_what_is_expected(seed):
    """Layers in an order, between them others that nobody foresees."""
    run, choose = Run(seed, sizes=[40, 47, 300, 90, 61, 500, 33, 70]), random.Random(seed)
    ordered, experts = run.layers[:6], run.layers[6:]
    run.expect(ordered)
    for layer in ordered * 2:
        run.call(layer)
    misses, others = run.slots.misses, 0
    for layer in ordered * 4:
        run.call(layer)
        for _ in range(choose.randrange(4)):
            run.call(choose.choice(experts), ordered=False)
            others += 1
    run.check(36 + others)
    assert run.slots.misses <= misses + others


@pytest.mark.parametrize("sizes", [None, UNEQUAL])
@pytest.mark.parametrize("seed", range(30))
def test_any_order_any_stream(seed, sizes):
    """Skipped layers, the same one again, others, on two streams. `turboquant-model` reads another
    layer's bytes where one is skipped."""
    run, choose = Run(seed, sizes=sizes), random.Random(seed)
    run.expect(run.layers)
    for _ in range(60):
        run.device.current = choose.choice("ab")
        run.call(choose.choice(run.layers), ordered=choose.random() < 0.8)
    run.check(60)


@pytest.mark.parametrize("seed", range(10))
def test_calls_within_calls(seed):
    """Three layers at a time: two slots, and memory of its own for the third."""
    run = Run(seed)
    a, b, c, *_ = run.layers
    for _ in range(3):
        run.call(a, lambda: run.call(b, lambda: run.call(c)))
        run.call(b, lambda: run.call(b, lambda: run.call(a)))
    run.check(18)


@pytest.mark.parametrize("seed", range(5))
def test_a_layer_that_raises_leaves_nothing_behind(seed):
    run = Run(seed)

    def fails():
        raise RuntimeError("mid-forward")

    for layer in run.layers * 2:
        with pytest.raises(RuntimeError, match="mid-forward"):
            run.call(layer, fails)
        run.call(layer)
    run.check(12)
    assert not any(place.lent for place in run.slots._places)


def test_a_copy_that_fails_is_not_taken_for_one(monkeypatch):
    run = Run(0)
    first, second, *_ = run.layers
    run.call(first)
    good = run.device.copy

    def fails(pairs, after, old):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(run.device, "copy", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.call(second)
    monkeypatch.setattr(run.device, "copy", good)
    run.call(second)
    run.check(2)


@pytest.mark.parametrize("before", [0, 3])
def test_memory_that_there_is_not_changes_nothing(before, monkeypatch):
    """At the first layer, and at one that is larger than the slots."""
    run = Run(0)
    for layer in run.layers[:before]:
        run.call(layer)
    large = run.layers[-1]
    large.tensors = [torch.randint(0, 99, (7000,), dtype=torch.uint8)]
    good = run.device.empty

    def fails(nbytes):
        raise RuntimeError("out of memory")

    places, size = list(run.slots._places), run.slots.nbytes
    monkeypatch.setattr(run.device, "empty", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.call(large)
    assert run.slots._places == places and run.slots.nbytes == size
    monkeypatch.setattr(run.device, "empty", good)
    for layer in (*run.layers, large):
        run.call(layer)
    run.check(before + len(run.layers) + 1)


def test_a_tensor_with_other_memory_is_copied_anew():
    run = Run(0, layers=1)
    (layer,) = run.layers
    run.call(layer)
    run.device.finish()
    for tensor in layer.tensors:
        tensor.data = tensor.data + 1
    run.call(layer)
    run.check(2)
    assert run.slots.hits == 0


def test_what_is_written_is_copied_anew():
    """Written in place, or replaced by other tensors; also while it was expected."""
    run = Run(0, layers=2)
    one, other = run.layers
    run.expect(run.layers)
    run.call(one)
    run.device.finish()
    other.tensors[0].add_(50)  # its copy is there already
    run.call(other)
    run.device.finish()
    one.tensors = [tensor + 100 for tensor in one.tensors]
    run.call(one)
    run.check(3)
    assert run.slots.hits == 0


def test_tensors_of_inference_mode_are_always_copied():
    run = Run(0, layers=1)
    (layer,) = run.layers
    with torch.inference_mode():
        layer.tensors = [tensor.clone() for tensor in layer.tensors]
        run.call(layer)
        run.device.finish()
        layer.tensors[0].add_(1)
        run.call(layer)
    run.check(2)
    assert run.slots.misses == 2


def test_inference_mode_comes_and_goes():
    run = Run(0, layers=3)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            for layer in run.layers * 2:
                run.call(layer)
            run.device.finish()
    run.check(18)


def test_a_layer_has_other_shapes():
    """Where it was before, and of the same size: other views."""
    run = Run(0, layers=2)
    layer = run.layers[0]
    for tensor in (torch.full((64,), 1.5, dtype=torch.float16), torch.full((8, 16), 7)):
        for dtype in (torch.float16, torch.bfloat16, torch.int16):
            layer.tensors = [tensor.to(dtype)]
            for one in run.layers:
                run.call(one)
    run.check(12)


def test_another_layer_at_the_same_place_is_another():
    run = Run(0, layers=2)
    one, other = run.layers
    other.tensors = one.tensors
    run.call(one)
    run.call(other)
    assert run.slots.misses == 2


def test_a_wrong_expectation_is_given_up():
    """Experts that are chosen anew each time: nothing is copied for those that do not come."""
    run, choose = Run(0, layers=8), random.Random(1)
    for _ in range(100):
        run.call(choose.choice(run.layers))
    run.check(100)
    assert run.device.copies < 1.3 * run.slots.misses


def test_what_is_expected_and_fails_stops_no_other_layer(monkeypatch):
    """It is the layer itself that raises, when it is called."""
    run = Run(0)
    run.expect(run.layers)

    def fail():
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(run.layers[1], "sources", fail)
    for _ in range(3):
        run.call(run.layers[0])
    run.check(3)


def test_layers_that_are_gone_are_not_expected():
    run = Run(0, layers=3)
    run.expect(run.layers)
    first = run.layers[0]
    del run.layers[1:]
    run.call(first)
    run.check(1)
    assert run.device.copies == 1


def test_threads_take_turns():
    run = Run(0)
    failed = []

    def work(seed):
        choose = random.Random(seed)
        try:
            for _ in range(40):
                layer = choose.choice(run.layers)
                with run.lent(layer) as here:
                    run.device.finish()
                    assert all(map(torch.equal, here, layer.tensors))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_simulation_finds_missing_events():
    """Slots that forget who reads them, or do not wait, read other layers' bytes here."""
    for broken in ("wait", "mark"):
        found = 0
        for seed in range(20):
            run = Run(seed)
            if broken == "wait":
                run.device.wait = lambda event: None
            else:
                done = Event()
                done.done = True
                run.device.mark = lambda memory, used, done=done: used.update(a=done)
            for layer in run.layers * 4:
                run.call(layer)
            run.device.finish()
            found += not all(run.read)
        assert found > 0, broken


def test_one_event_for_each_stream_is_kept_of_layers_that_are_never_copied_again():
    run = Run(0)
    for _ in range(50):
        for layer in run.layers[:2]:
            run.call(layer)
    run.device.finish()
    assert all(run.read)
    assert all(len(place.used) <= 2 for place in run.slots._places)


def test_another_tensor_at_the_same_address_is_copied():
    run = Run(0)
    layer = run.layers[0]
    memory = torch.zeros(64, dtype=torch.uint8)
    layer.tensors = [memory.detach()]
    run.call(layer)
    run.device.finish()
    memory.numpy()[:] = 7  # which no version counts
    layer.tensors = [memory.detach()]
    with run.lent(layer) as here:
        run.device.finish()
        assert all(map(torch.equal, here, layer.tensors))


def test_tensors_of_inference_mode_are_copied_once_a_call():
    run = Run(0)
    with torch.inference_mode():
        for layer in run.layers:
            layer.tensors = [tensor.clone() for tensor in layer.tensors]
    for _ in range(3):
        for layer in run.layers:
            run.call(layer)
    run.device.finish()
    assert all(run.read)
    assert run.device.copies == 3 * len(run.layers)
