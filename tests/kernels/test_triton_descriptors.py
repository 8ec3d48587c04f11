"""Tensor descriptors in replayed launches: encoded once an address, as Triton's launcher would before every launch."""

from __future__ import annotations

import types

import pytest
import torch

triton = pytest.importorskip("triton")
driver = pytest.importorskip("triton.backends.nvidia.driver")
if not triton.__version__.startswith(("3.5.", "3.6.")):
    pytest.skip("the launcher below is that of Triton 3.5 and 3.6", allow_module_level=True)

from ring_la.kernels.runtime import tape  # noqa: E402
from ring_la.kernels.runtime.triton_version import CompiledKernel  # noqa: E402

HOW = dict(swizzle=3, elem_size=2, elem_type=9, block_size=[64, 128], fp4_padded=False)
SIGNATURE = dict(enumerate(["fp32", "tensordesc<bf16[64,128]>", "*bf16", "tensordesc<bf16[64,128]>", "constexpr"]))
TILED = tape.TapedDescriptor(None, [32768, 4096], [4096, 1], [64, 128])


class Launcher:
    """Triton's launcher, but for what it launches; `launched` is what a kernel would get."""

    launch_cooperative_grid = launch_pdl = False
    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.launched: list[tuple] = []
        self.launch = driver.wrap_handle_tensordesc(lambda *args: self.launched.append(args), SIGNATURE, [HOW, HOW])

    def __call__(self, *args) -> None:
        self.launch(*args[:5], False, False, None, None, *args[5:])


@pytest.fixture
def encoded(monkeypatch) -> list[tuple]:
    """What the driver was asked to encode."""
    asked: list[tuple] = []

    def fill(*args) -> str:
        asked.append(args)
        return f"map of {args[0]}"

    utils = types.SimpleNamespace(fill_tma_descriptor=fill)
    monkeypatch.setattr(
        type(triton.runtime.driver), "active", property(lambda _: types.SimpleNamespace(utils=utils)), raising=False
    )
    return asked


def launched(run: Launcher, cached: bool, monkeypatch) -> tape.TapedLaunch:
    """A kernel of (number, descriptor, tensor, descriptor, constant, constant), written down."""
    kernel = types.SimpleNamespace(run=run, function=1, packed_metadata="metadata")
    how = CompiledKernel(kernel, ["a constant", 8])
    if not cached:
        monkeypatch.setattr(how, "encoding", lambda: (how, {}))
    args = [(0, 0.5), (1, 0), (2, 16), (2, 64)]
    return tape.TapedLaunch.of(how, (3, 2, 1), args, {1: TILED, 3: TILED}, None)


def play(one: tape.TapedLaunch, *bases: int) -> None:
    one.play(types.SimpleNamespace(bases=[0, *bases], stream=7))


def test_a_launch_gets_what_tritons_launcher_would_make(encoded, monkeypatch):
    runs = Launcher(), Launcher()
    mine, theirs = (launched(run, run is runs[0], monkeypatch) for run in runs)
    for bases in ((4096, 8192), (4096, 1 << 20), (4096, 8192)):
        for one in (mine, theirs):
            play(one, *bases)
    assert runs[0].launched == runs[1].launched
    assert "map of 1048640" in runs[0].launched[1]


def test_an_address_is_encoded_once(encoded, monkeypatch):
    one = launched(Launcher(), True, monkeypatch)
    for _ in range(3):
        play(one, 4096, 8192)
    assert [x[0] for x in encoded] == [4096, 8192 + 64]
    for n in range(tape.MAPS):
        play(one, 4096, 16384 * (n + 2))
    assert len(one.tiles[1][3]) <= tape.MAPS
    play(one, 4096, 8192)
    assert encoded[-1][0] == 8192 + 64, "what was dropped is encoded anew"


def played(cached: bool, monkeypatch, watched: bool, how: type[Launcher] = Launcher) -> list[tuple]:
    """What kernels get of a tape of an allocation, a launch, a step in order and a launch on another stream."""
    run, order = how(), []
    one = launched(run, cached, monkeypatch)
    other = one._replace(stream=types.SimpleNamespace(cuda_stream=11))
    step = tape.TapedOrder(lambda: order.append(len(run.launched)))
    room = ((3, (64, 4), (4, 1), torch.float32),)
    last = one._replace(places=tuple((i, 3, 16) for i, *_ in one.places))
    made = tape.Tape(4, room, (one, step, other, last), (), (3, 1), "cpu")
    monkeypatch.setattr(tape, "watched", lambda: watched)
    playing = tape.Playback(torch.empty(1))
    playing.stream = 7
    for address in (4096, 8192):
        playing.bring(torch.empty(1), address)
    x, _ = made.play(playing)
    assert x.shape == (64, 4)
    assert order == [1]
    return [tuple("new" if y == x.data_ptr() + 16 else y for y in args) for args in run.launched]


@pytest.mark.parametrize("cached", [True, False])
def test_written_code_launches_what_the_steps_do(cached, encoded, monkeypatch):
    """Of launches by descriptors and addresses, with numbers and constants, on two streams."""
    by_steps = played(cached, monkeypatch, watched=True)
    assert played(cached, monkeypatch, watched=False) == by_steps
    assert [args[3] for args in by_steps] == [7, 11, 7]
    assert "new" in by_steps[2]
    assert "new" not in by_steps[1]


def test_a_launcher_that_is_not_known_is_called_as_triton_does(encoded, monkeypatch):
    class Wrapped(Launcher):
        profile_scratch_size = 8

        def __call__(self, *args) -> None:
            super().__call__(*args)
            self.launched[-1] = ("its own", *self.launched[-1])

    assert all(args[0] == "its own" for args in played(False, monkeypatch, False, Wrapped))
