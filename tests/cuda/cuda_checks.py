"""What workers with CUDA tensors must give: what one process gives on the CPU."""

from __future__ import annotations

import copy
import importlib.util
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor

import models
import parity
import tessel
from movements import MOVEMENTS, assert_close, case, me, mine
from tessel import nn, transport
from tessel.data import FromArray, PartDataset, PartLoader
from tessel.models import FNO
from tessel.operators import gradient
from tessel.transport import wire
from tessel.transport.group import Membership

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def loss(worker: int, y: Tensor) -> Tensor:
    return ((y * y.conj()).real * (worker + 1)).sum() + y.real.sum()


def check_movement(name: str, dtype: torch.dtype) -> None:
    """Values and gradients of CUDA tensors are those of one process on the CPU."""
    movement = case(name)
    tolerance = 1e-4 if dtype in (torch.float32, torch.complex64) else 1e-12
    everyones = movement.leaves(dtype)
    x = mine(everyones).cuda().requires_grad_()
    y = movement.layer(x)
    assert y.is_cuda and y.dtype == dtype
    assert_close(y.detach().cpu(), mine(movement.reference(everyones)), tolerance)
    loss(me(), y).backward()
    assert x.grad is not None and x.grad.is_cuda
    assert_close(x.grad.cpu(), mine(movement.gradients(everyones, loss)), tolerance)


def check_all_movements() -> None:
    for name in MOVEMENTS:
        for dtype in DTYPES:
            check_movement(name, dtype)


def check_kinds_of_tensors() -> None:
    """Other dtypes, odd strides, placeholders on the CPU, and copies that stay on the GPU."""
    layer = nn.AllGather(tessel.world(), 0, 0)
    n = tessel.world().size
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        x = torch.ones(2, 3, device="cuda").to(dtype)
        assert torch.equal(layer(x), torch.ones(2 * n, 3, device="cuda").to(dtype))
    x = torch.arange(6.0, device="cuda").reshape(2, 3)
    assert torch.equal(layer(x.T), torch.cat([x.T] * n))
    assert torch.equal(layer(x[:1].expand(2, 3)), torch.cat([x[:1].expand(2, 3)] * n))
    first = tessel.world().create_partition_inclusive([0])
    for _ in range(50):  # what is lazy is not done by a host that does not wait for the GPU
        z = torch.randn(3, 3, dtype=torch.complex64, device="cuda")
        z = nn.Broadcast(first, tessel.world())(z)
        for lazy in (z.conj(), z.conj().imag, z.conj().T):
            assert torch.equal(layer(lazy), torch.cat([lazy] * n))
    given = x if me() == 0 else tessel.zero_volume_tensor()
    assert torch.equal(nn.Broadcast(first, tessel.world())(given), x)


def check_some_gradients(workers: list[int]) -> None:
    """Only some inputs need a gradient, in first and second order."""
    movement = case("AllSumReduce")
    everyones = movement.leaves()
    x = mine(everyones).cuda().requires_grad_(me() in workers)
    loss(me(), movement.layer(x)).backward()
    if me() in workers:
        assert x.grad is not None
        assert_close(x.grad.cpu(), mine(movement.gradients(everyones, loss)))


def check_other_modes() -> None:
    """Forward mode, torch.func, autocast and torch.compile."""
    layer = nn.AllSumReduce(tessel.world(), [0])
    n = tessel.world().size
    x, t = torch.randn(3, 3, device="cuda"), torch.ones(3, 3, device="cuda")
    _, tangent = torch.func.jvp(lambda v: layer(v.sin()), (x,), (t,))
    assert_close(tangent, layer(x.cos()), 1e-5)
    _, pull = torch.func.vjp(layer, x)
    assert_close(pull(t)[0], n * t, 1e-5)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(x @ t).dtype == torch.bfloat16
    compiled = torch.compile(lambda v: layer(v * v).sin(), fullgraph=True, backend="aot_eager")
    v, w = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = compiled(v), layer(w * w).sin()
    assert_close(y, z, 1e-5)
    y.sum().backward()
    z.sum().backward()
    assert v.grad is not None and w.grad is not None
    assert_close(v.grad, w.grad, 1e-5)


def check_layers() -> None:
    """Layers over all workers on the GPU give what torch's own give on the CPU."""
    n = tessel.world().size
    grid = (1, 1, n, 1)
    conv, pool = {"padding": 1, "stride": 2}, {"padding": 1, "stride": 2}
    for name, args, settings, shape in (
        ("Conv2d", (3, 4, 3), conv, (2, 3, 11, 8)),
        ("Conv2d", (3, 4, 3), {"padding": 1}, (1, 3, 256, 256)),  # by strips
        ("Conv2d", (3, 4, 3), {"padding": 1, "padding_mode": "circular"}, (2, 3, 9, 8)),
        ("ConvTranspose2d", (3, 4, 3), {"stride": 2, "output_padding": 1}, (2, 3, 7, 8)),
        ("MaxPool2d", (3,), pool, (2, 3, 11, 8)),
        ("AvgPool2d", (3,), pool, (2, 3, 11, 8)),
        ("AdaptiveAvgPool2d", (1,), {}, (2, 3, 11, 8)),
        ("AdaptiveMaxPool2d", (3,), {}, (2, 3, 11, 8)),
        ("BatchNorm2d", (3,), {}, (2, 3, 11, 8)),
        ("GroupNorm", (1, 3), {}, (2, 3, 11, 8)),
        ("Upsample", (), {"scale_factor": 2, "mode": "bilinear"}, (2, 3, 11, 8)),
        ("Upsample", (), {"scale_factor": 2}, (2, 3, 11, 8)),
    ):
        case = parity.Case(name, args, grid, shape, tuple(settings.items()))
        compare_on_gpu(case.torch_layer(), case.layer(), shape, case.layout())


def compare_on_gpu(
    alone: torch.nn.Module, spread: torch.nn.Module, shape: tuple[int, ...], layout: tessel.Layout
) -> None:
    spread.load_state_dict(alone.state_dict())
    spread.cuda()
    x = parity.values(shape, 3)
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).cuda().requires_grad_()
    expected, got = alone(whole), spread(part)
    split = got.dim() == len(layout.shape)
    out = (
        layout.resized(expected.shape)
        if split
        else tessel.Layout.whole(layout.partition, expected.shape)
    )
    parity.close("output", got.cpu(), out.local_part(expected), 1e-10)
    weights = parity.values(expected.shape, 5)
    (expected * weights).sum().backward()
    (got * out.local_part(weights).cuda()).sum().backward()
    parity.close("gradient", part.grad.cpu(), layout.local_part(whole.grad), 1e-10)
    for p, q in zip(alone.parameters(), spread.parameters(), strict=True):
        parity.close("gradient of a parameter", q.grad.cpu(), p.grad, 1e-9)


def check_models() -> None:
    """Converted models on the GPU give what the models give on the CPU."""
    n = tessel.world().size
    for name, args, shape in (
        ("UNet", (2, 4), (1, 1, 18, 16)),
        ("UNet", (3, 2), (1, 1, 9, 8, 8)),
        ("ResNet18", (4,), (2, 3, 64, 64)),
        ("VGG", (16,), (2, 3, 16, 16)),
    ):
        P = tessel.world().create_cartesian_topology_partition([1, 1, n, *[1] * (len(shape) - 3)])
        torch.manual_seed(1)
        alone = getattr(models, name)(*args).double()
        spread = nn.distribute_module(copy.deepcopy(alone), P)
        compare_on_gpu(alone, spread, shape, tessel.Layout.balanced(P, shape))


def check_operators() -> None:
    """Products of operators, their gradients and adjoints, on the GPU as on the CPU."""
    n = tessel.world().size
    real, pair = torch.float64, torch.complex128
    F = tessel.kron(tessel.ParDFT(pair, 6), tessel.ParDFT(real, 10), tessel.ParIdentity(real, 3))
    W = tessel.kron(
        tessel.ParDiagonal(pair, 6),
        tessel.ParRestriction(pair, 6, [range(3), range(4, 6)]),
        tessel.ParMatrix(pair, 3, 3),
    )
    chain = W.H @ W @ F
    torch.manual_seed(4)
    theta = tessel.init(chain)
    x = parity.values((6, 10, 3), 3)
    expected = chain(theta) * x
    grad = gradient(lambda t: (chain(t) * x).abs().square().sum(), theta)
    spread = tessel.distribute(chain, [n, 1, 1])
    part = spread.layout_in.local_part(x).cuda()
    on_gpu = theta.to("cuda")
    y = spread(on_gpu) * part
    parity.close("output", y.cpu(), spread.layout_out.local_part(expected), 1e-10)
    back = spread.H(on_gpu) * y
    whole = chain.H(theta) * expected
    parity.close("adjoint", back.cpu(), spread.layout_in.local_part(whole), 1e-10)
    found = gradient(lambda t: (spread(t) * part).abs().square().sum(), on_gpu)
    for leaf, value in grad.items():
        parity.close("gradient of a parameter", found[leaf].cpu(), value, 1e-9)


def check_sixteen_bits() -> None:
    """Transforms of 16 bits, which a GPU has for lengths that are powers of two, and sums."""
    n = tessel.world().size
    real, pair = torch.float16, torch.complex32
    F = tessel.kron(tessel.ParDFT(real, 8), tessel.ParDFT(pair, 4))
    wide = tessel.kron(tessel.ParDFT(torch.float64, 8), tessel.ParDFT(torch.complex128, 4))
    spread = tessel.distribute(F, [1, n])
    x = parity.values((8, 4), 3).to(real)
    part = spread.layout_in.local_part(x).cuda().requires_grad_()
    y = spread * part
    near = 16 * torch.finfo(real).eps  # a few roundings for each of the two transforms
    expected = wide * x.double()
    parity.close(
        "output", y.detach().cpu().to(expected.dtype), spread.layout_out.local_part(expected), near
    )
    (slope,) = torch.autograd.grad(y, part, y.detach())
    back = spread.layout_in.local_part(wide.H * expected)
    parity.close("gradient", slope.cpu().double(), back, near)
    other = tessel.distribute(tessel.ParDFT(real, 6))
    try:
        other * torch.ones(6, dtype=real, device="cuda")
    except ValueError as error:
        assert "torch does not support float16 on cuda" in str(error)
    else:
        raise AssertionError("a length that torch has no transform for")
    for dtype in (real, torch.bfloat16):
        total = tessel.ParReduce(dtype) * torch.ones(3, dtype=dtype, device="cuda")
        assert total.tolist() == [n] * 3


def check_fno() -> None:
    """A Fourier neural operator on the GPU gives what it gives on the CPU."""
    n = tessel.world().size
    P = tessel.world().create_cartesian_topology_partition([1, 1, n, 1])
    model = FNO(P, 2, 1, width=4, modes=3, blocks=2, dtype=torch.float64)
    x = tessel.Layout.balanced(P, (2, 2, 12, 10)).local_part(parity.values((2, 2, 12, 10), 3))
    expected = model(x)
    expected.square().sum().backward()
    grads = [each.grad.clone() for each in model.parameters()]
    model.cuda().zero_grad()
    got = model(x.cuda())
    parity.close("output", got.cpu(), expected, 1e-10)
    got.square().sum().backward()
    for each, grad in zip(model.parameters(), grads, strict=True):
        parity.close("gradient of a parameter", each.grad.cpu(), grad, 1e-9)


def check_data() -> None:
    """Parts that were read come to the GPU, by way of pinned memory or not; files take them."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, P.size])
    values = torch.arange(30.0).reshape(3, 10)
    dataset = PartDataset(FromArray(values), grid)
    for pins in (False, True):
        loader = PartLoader(dataset, 2, pin_memory=pins, device="cuda")
        found = list(loader)
        assert all(x.local.is_cuda for x in found)
        assert torch.equal(torch.cat([x.full() for x in found]).cpu(), values)
        processes = PartLoader(dataset, pin_memory=pins, device="cuda", num_workers=1)
        assert torch.equal(torch.cat([x.full() for x in processes]).cpu(), values)
    folder = P.group.share_objects(tempfile.mkdtemp())[0]
    names = ["x.zarr", "x"] if importlib.util.find_spec("zarr") else ["x"]
    for name in names:
        tessel.save(found[0], f"{folder}/{name}")
        again = tessel.load(f"{folder}/{name}", grid, device="cuda")
        assert again.local.is_cuda and torch.equal(again.full().cpu(), values[:2])


def check_everything() -> None:
    if dist.is_initialized():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    check_all_movements()
    check_kinds_of_tensors()
    check_some_gradients([0])
    check_other_modes()
    check_layers()
    check_models()
    check_operators()
    check_sixteen_bits()
    check_fno()
    check_data()


def check_nccl_world_of_one(folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    check_everything()
    dist.destroy_process_group()


def check_nccl_transport(folder: str, backend: str) -> None:
    """What movements call, on a group of one whose messages NCCL really carries."""
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    handle = dist.group.WORLD
    group = transport.Group((0,), handle, Membership())
    for dtype in (torch.float32, torch.complex64, torch.bool, torch.bfloat16):
        x = torch.ones(5, device="cuda").to(dtype)
        y = torch.zeros_like(x)
        sends, receives = [transport.SendBuffer(0, x)], [transport.ReceiveBuffer(0, y)]
        (received,), wait = wire.swap((0,), sends, receives, x.device, handle)
        wait()
        assert torch.equal(received, x)
        group.exchange(sends, receives, x.device)()
        assert torch.equal(y, x)
    assert torch.equal(group.sum(torch.ones(3, device="cuda")), torch.ones(3, device="cuda"))
    words = torch.tensor([3, -4], dtype=torch.int64).numpy().tobytes()
    assert group.share_words([3, -4]).startswith(words)
    assert wire.share_words([3, -4], 1, wire.control_device(handle), handle) == words
    assert group.share_objects("text") == ["text"]
    dist.destroy_process_group()


def mixed_devices() -> str:
    """One worker passes a CPU tensor: all raise."""
    x = torch.ones(3, device="cuda" if me() == 0 else "cpu")
    try:
        nn.AllSumReduce(tessel.world(), [0])(x)
    except ValueError as error:
        return str(error)
    return ""
