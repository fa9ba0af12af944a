"""Both scripts of the documentation that users know, with the package's name changed.

Tests `imaging/factory.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepinv
import pytest
import torch
from torch import Tensor

from pictures import Median, picture
from scripts import main_program, python
from tessel.imaging import (
    DistributedContext,
    DistributedDataFidelity,
    DistributedLinearPhysics,
    DistributedMeasurements,
    DistributedPrior,
    DistributedSignal,
    FactoryConfig,
    TilingConfig,
    make_distrib_bundle,
)

Run = Callable[..., list[Any]]
COMMON = Path(__file__).parents[1] / "common"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of gaussian_blur

# What the scripts leave to the user: a picture, the numbers of the first, and weights. A denoiser
# without weights stands for DRUNet, under the same name.
BEFORE = """
import sys
import torch
import deepinv
from pictures import picture, Median

deepinv.models.DRUNet = Median
clean_image, num_iterations, lr = picture(48, 40), 3, 1.0

def load_your_image(size, device):
    return picture(*size).to(device)

def save_image(image, name):
    torch.save(image, sys.argv[1])
"""
FIRST = """
import torch
from deepinv.physics import Blur, GaussianNoise, stack
from deepinv.physics.blur import gaussian_blur
from deepinv.optim import L2, PnP
from deepinv.models import DRUNet
from tessel.imaging import (
    DistributedContext,
    FactoryConfig,
    TilingConfig,
    make_distrib_bundle,
)

# Initialize distributed context (works for single or multi-process)
with DistributedContext(seed=42) as ctx:

    # Create multiple physics operators
    kernels = [
        gaussian_blur(sigma=1.0),
        gaussian_blur(sigma=2.0),
        gaussian_blur(sigma=(1.5, 3.0), angle=30),
    ]

    physics_list = []
    for kernel in kernels:
        blur_op = Blur(filter=kernel, padding="circular")
        blur_op.noise_model = GaussianNoise(sigma=0.03)
        physics_list.append(blur_op)

    # Stack physics operators and generate measurements
    stacked_physics = stack(*physics_list)
    measurements = stacked_physics(clean_image)

    # Configure distributed components
    factory_config = FactoryConfig(
        physics=stacked_physics,
        measurements=measurements,
        data_fidelity=L2(),
    )

    tiling_config = TilingConfig(
        patch_size=128,
        receptive_field_size=32,
    )

    # Build distributed bundle
    denoiser = DRUNet(pretrained="download")
    pnp_prior = PnP(denoiser=denoiser)

    bundle = make_distrib_bundle(
        ctx,
        factory_config=factory_config,
        signal_shape=clean_image.shape,
        prior=pnp_prior,
        tiling=tiling_config,
    )

    # Run PnP iterations
    bundle.signal.update_(torch.zeros_like(clean_image))

    for it in range(num_iterations):
        # Data fidelity gradient (distributed)
        grad = bundle.data_fidelity.grad(bundle.signal)

        # Gradient step
        new_data = bundle.signal.data - lr * grad
        bundle.signal.update_(new_data)

        # Denoising step (distributed)
        denoised = bundle.prior.prox(bundle.signal, sigma_denoiser=0.05)
        bundle.signal.update_(denoised)

    # Final result is in bundle.signal.data
"""
AFTER_FIRST = """
    if ctx.rank == 0:
        save_image(bundle.signal.data, "result.png")
"""
COMPLETE = """
import torch
from deepinv.physics import Blur, GaussianNoise, stack
from deepinv.physics.blur import gaussian_blur
from deepinv.optim import L2, PnP
from deepinv.models import DRUNet
from tessel.imaging import (
    DistributedContext,
    FactoryConfig,
    TilingConfig,
    make_distrib_bundle,
)

def main():
    # Configuration
    num_iterations = 10
    lr = 1.0
    denoiser_sigma = 0.05
    img_size = (512, 512)

    with DistributedContext(seed=42) as ctx:
        # Load or create clean image
        clean_image = load_your_image(img_size, device=ctx.device)

        # Create multiple blur operators
        kernels = [
            gaussian_blur(sigma=1.0, device=str(ctx.device)),
            gaussian_blur(sigma=2.0, device=str(ctx.device)),
            gaussian_blur(sigma=(1.5, 3.0), angle=30, device=str(ctx.device)),
        ]

        physics_list = []
        for kernel in kernels:
            blur_op = Blur(filter=kernel, padding="circular")
            blur_op.noise_model = GaussianNoise(sigma=0.03)
            physics_list.append(blur_op.to(ctx.device))

        # Stack and generate measurements
        stacked_physics = stack(*physics_list)
        measurements = stacked_physics(clean_image)

        # Load denoiser
        denoiser = DRUNet(pretrained="download").to(ctx.device)
        pnp_prior = PnP(denoiser=denoiser)

        # Configure and build distributed components
        factory_config = FactoryConfig(
            physics=stacked_physics,
            measurements=measurements,
            data_fidelity=L2(),
        )

        tiling_config = TilingConfig(
            patch_size=128,
            receptive_field_size=32,
        )

        bundle = make_distrib_bundle(
            ctx,
            factory_config=factory_config,
            signal_shape=clean_image.shape,
            prior=pnp_prior,
            tiling=tiling_config,
        )

        # Initialize reconstruction
        bundle.signal.update_(torch.zeros_like(clean_image))

        # PnP iterations
        with torch.no_grad():
            for it in range(num_iterations):
                # Data fidelity gradient step
                grad = bundle.data_fidelity.grad(bundle.signal)
                new_data = bundle.signal.data - lr * grad
                bundle.signal.update_(new_data)

                # Denoising step
                denoised = bundle.prior.prox(
                    bundle.signal, sigma_denoiser=denoiser_sigma
                )
                bundle.signal.update_(denoised)

                # Log progress (only on rank 0)
                if ctx.rank == 0 and (it + 1) % 2 == 0:
                    print(f"Iteration {it+1}/{num_iterations}")

        # Get final result
        reconstruction = bundle.signal.data

        # Save or visualize (only on rank 0)
        if ctx.rank == 0:
            save_image(reconstruction, "result.png")

if __name__ == "__main__":
    main()
"""
SCRIPTS = {"first": FIRST + AFTER_FIRST, "complete": COMPLETE.replace("(512, 512)", "(160, 144)")}


def perform(folder: str, *arguments: str) -> None:
    """Run a script on this worker, on which deepinv is then what it was before."""
    drunet = deepinv.models.DRUNet
    try:
        main_program(folder, *arguments)
    finally:
        deepinv.models.DRUNet = drunet


def psnr(x: Tensor, clean: Tensor) -> float:
    return -10 * (x - clean).square().mean().log10().item()


def start(script: Path, result: Path) -> None:
    """As its users start it, on two workers."""
    done = python(
        *("-m", "torch.distributed.run", "--nproc_per_node=2", script, result),
        env={**os.environ, "PYTHONPATH": paths(), "OMP_NUM_THREADS": "1"},
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def paths() -> str:
    """Where the processes of this test find modules: what tests share, and what this one finds."""
    return os.pathsep.join([str(COMMON), *filter(None, [os.environ.get("PYTHONPATH")])])


NOISE = "measurements = stacked_physics(clean_image)"
SHARED = f"with ctx.shared_random(): {NOISE}"


@pytest.mark.slow
@pytest.mark.limit(400)
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_the_scripts_run(run: Run, tmp_path: Path, name: str) -> None:
    """On one, two and four workers; the first on two by torchrun, as users start it.

    Each worker draws the noise of its measurements from a stream of its own, as the document says;
    from the shared one, all numbers of workers come to the same image.
    """
    clean = picture(160, 144) if name == "complete" else picture(48, 40)
    assert SCRIPTS[name].count(NOISE) == 1
    found = []
    for workers, noise in ((1, SHARED), (2, SHARED), (4, SHARED), (2, NOISE)):
        script, result = tmp_path / f"{name}.py", tmp_path / "result.pt"
        script.write_text(BEFORE + SCRIPTS[name].replace(NOISE, noise))
        if (name, workers, noise) == ("first", 2, SHARED):
            start(script, result)
        else:
            run(perform, str(tmp_path), script.name, str(result), nprocs=workers, timeout=110)
        found.append(torch.load(result))
        assert psnr(found[-1], clean) > (24 if name == "complete" else 18)
    for other in found[1:3]:
        assert (found[0] - other).abs().max() < 1e-5  # float32, over all iterations
    assert (found[0] - found[3]).abs().max() > 1e-3  # another noise


def curve(reduction: str) -> list[float]:
    """The complete example, step by step."""
    clean = picture(96, 80)
    blur = deepinv.physics.blur.gaussian_blur
    kernels = [blur(sigma=1.0), blur(sigma=2.0), blur(sigma=(1.5, 3.0), angle=30)]
    with DistributedContext(seed=42) as ctx:
        physics = [deepinv.physics.Blur(filter=each, padding="circular") for each in kernels]
        for each in physics:
            each.noise_model = deepinv.physics.GaussianNoise(sigma=0.03)
        stacked = deepinv.physics.stack(*physics)
        with ctx.shared_random():  # the same noise for any number of workers
            measurements = stacked(clean)
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(stacked, measurements, deepinv.optim.L2()),
            signal_shape=clean.shape,
            reduction=reduction,
            prior=deepinv.optim.PnP(denoiser=Median()),
            tiling=TilingConfig(patch_size=32, receptive_field_size=8),
        )
        assert bundle.prior is not None and bundle.prior.num_patches == 9
        found = []
        with torch.no_grad():
            for _ in range(10):
                bundle.signal.update_(bundle.signal.data - bundle.data_fidelity.grad(bundle.signal))
                bundle.signal.update_(bundle.prior.prox(bundle.signal, sigma_denoiser=0.05))
                found.append(psnr(bundle.signal.data, clean))
        return found


def test_psnr_rises(run: Run) -> None:
    """At a step length of one, over ten iterations; the curve of any number of workers."""
    curves = [each for nprocs in (1, 2, 4) for each in run(curve, "mean", nprocs=nprocs)]
    first = curves[0]
    assert all(a < b for a, b in pairwise(first)), first
    assert first[-1] > first[0] + 1
    for other in curves[1:]:
        assert max(abs(a - b) for a, b in zip(first, other, strict=True)) < 1e-4, other


def test_a_sum_is_too_much_for_a_step_of_one(run: Run) -> None:
    """Which is why the bundle takes the mean."""
    (found,) = run(curve, "sum", nprocs=1)
    assert not found[-1] > 0


def by_hand() -> list[Any]:
    """The components one by one, as the documentation makes them."""
    L2 = deepinv.optim.L2
    with DistributedContext(seed=1) as ctx:
        clean = picture(24, 20)
        kernels = [deepinv.physics.blur.gaussian_blur(sigma=s) for s in (1.0, 2.0, 1.5)]
        physics_list = [deepinv.physics.Blur(filter=k, padding="circular") for k in kernels]
        measurements = [each.A(clean) for each in physics_list]

        def physics_factory(idx: int, device: torch.device, shared: Any) -> Any:
            return physics_list[idx].to(device)

        def measurements_factory(idx: int, device: torch.device, shared: Any) -> Tensor:
            return measurements[idx].to(device)

        dphysics = DistributedLinearPhysics(ctx, num_ops=len(physics_list), factory=physics_factory)
        dmeasurements = DistributedMeasurements(
            ctx, num_items=len(measurements), factory=measurements_factory
        )
        ddata_fidelity = DistributedDataFidelity(
            ctx, dphysics, dmeasurements, data_fidelity_factory=lambda idx, dev, s: L2()
        )
        dsignal = DistributedSignal(ctx, shape=clean.shape)
        dprior = DistributedPrior(
            ctx=ctx,
            prior=deepinv.optim.PnP(denoiser=Median()),
            strategy="smart_tiling",
            signal_shape=clean.shape,
            strategy_kwargs={"patch_size": 8, "receptive_field_size": 2},
        )
        dsignal.update_(clean.to(ctx.device))
        assert ddata_fidelity(dsignal) < 1e-9
        assert len(list(dmeasurements)) == len(dphysics.local_indices)
        if 0 in dphysics.local_indices:
            assert torch.equal(dmeasurements[0], measurements[0])
        return [ddata_fidelity.grad(dsignal), dprior.prox(dsignal, sigma_denoiser=0.05)]


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_components_one_by_one(run: Run, nprocs: int) -> None:
    results = run(by_hand, nprocs=nprocs)
    assert all(torch.equal(a, b) for each in results for a, b in zip(each, results[0], strict=True))


def configured(how: str) -> Tensor:
    """The gradient of one problem, whichever way it is written down."""
    clean = picture(12, 10)
    kernels = [deepinv.physics.blur.gaussian_blur(sigma=s) for s in (0.5, 0.8)]
    physics = [deepinv.physics.Blur(filter=k, padding="circular") for k in kernels]
    ys = [each.A(clean) for each in physics]
    fidelities = [deepinv.optim.L2(), deepinv.optim.L2(sigma=0.5)]
    stacked = deepinv.optim.StackedPhysicsDataFidelity(fidelities)
    shared = {"factor": 1.0}
    configs: dict[str, Callable[[], FactoryConfig]] = {
        "lists": lambda: FactoryConfig(physics, ys, fidelities),
        "stacks": lambda: FactoryConfig(
            deepinv.physics.stack(*physics), deepinv.utils.TensorList(ys), stacked
        ),
        "functions": lambda: FactoryConfig(
            lambda i, device, shared: physics[i],
            lambda i, device, shared: shared["factor"] * ys[i],
            lambda i, device, shared: fidelities[i],
            num_operators=2,
            shared=shared,
        ),
        "mixture": lambda: FactoryConfig(physics, lambda i, device, shared: ys[i], fidelities),
    }
    with DistributedContext() as ctx:
        bundle = make_distrib_bundle(ctx, factory_config=configs[how](), signal_shape=clean.shape)
        assert isinstance(bundle.physics, DistributedLinearPhysics) and bundle.prior is None
        x = torch.ones_like(clean)
        triples = zip(fidelities, ys, physics, strict=True)
        expected = sum(f.grad(x, y, each) for f, y, each in triples) / 2
        found = bundle.data_fidelity.grad(x)
        assert (found - expected).abs().max() < 1e-5
        return found


@pytest.mark.parametrize("how", ["lists", "stacks", "functions", "mixture"])
def test_ways_to_write_a_problem_down(run: Run, how: str) -> None:
    first, second = run(configured, how, nprocs=2)
    assert torch.equal(first, second)


def test_one_operator_needs_no_list() -> None:
    clean = picture(12, 10)
    physics = deepinv.physics.Denoising()
    config = FactoryConfig(physics, clean)
    assert config.count == 1
    with DistributedContext() as ctx:
        bundle = make_distrib_bundle(ctx, factory_config=config, signal_shape=clean.shape)
        assert (bundle.data_fidelity.grad(bundle.signal) + clean).abs().max() < 1e-6
        nonlinear = FactoryConfig([deepinv.physics.Haze()], [clean])
        assert not nonlinear.is_linear
        with pytest.raises(ValueError, match="requires a prior, got prior=None"):
            make_distrib_bundle(
                ctx, factory_config=config, signal_shape=clean.shape, tiling=TilingConfig()
            )
        with pytest.raises(ValueError, match="one of sum, mean, got 'max'"):
            make_distrib_bundle(
                ctx, factory_config=config, signal_shape=clean.shape, reduction="max"
            )
    with pytest.raises(ValueError, match="physics must be a list of operators or a function"):
        FactoryConfig(3, clean)
    with pytest.raises(ValueError, match="measurements must be a list of tensors or a function"):
        FactoryConfig(physics, 3)


def in_parts(grid: Any) -> list[Tensor]:
    """The bundle with the image in parts."""
    with DistributedContext(seed=1) as ctx:
        clean = picture(24, 20).double()
        kernels = [deepinv.physics.blur.gaussian_blur(sigma=s).double() for s in (0.5, 0.8, 1.0)]
        physics = [deepinv.physics.Blur(filter=k, padding="circular") for k in kernels]
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(physics, [each.A(clean) for each in physics]),
            signal_shape=clean.shape,
            dtype=torch.float64,
            prior=Median(),
            tiling=TilingConfig(patch_size=8, receptive_field_size=2),
            partition=grid,
        )
        assert isinstance(bundle.physics, DistributedLinearPhysics) and bundle.prior is not None
        signal = bundle.signal
        signal.update_(clean.flip(-1))
        with torch.no_grad():
            found = [bundle.data_fidelity(signal)]
            for value in (
                bundle.data_fidelity.grad(signal),
                bundle.prior.prox(signal, 0.1),
                bundle.physics.A_adjoint(bundle.physics.A(signal)),
                bundle.physics.A_dagger(bundle.measurements.local, tol=1e-9),
            ):
                signal.update_(value)
                found.append(signal.whole())
            found.append(bundle.physics.norm(signal, max_iter=20))
        return found


@pytest.mark.parametrize("grid", [(2, 2), (4, 1), (1, 2)])
def test_an_image_in_parts_gives_the_same(run: Run, grid: Any) -> None:
    (expected,) = run(in_parts, None, nprocs=1)
    for results in run(in_parts, grid, nprocs=4):
        for k, (a, b) in enumerate(zip(results[:-1], expected[:-1], strict=True)):
            tolerance = 1e-6 if k == 4 else 1e-10  # of a solver that stops at 1e-9
            assert (a - b).abs().max() < tolerance, k
        assert abs(results[-1] - expected[-1]) < 0.05  # after 20 steps from other numbers
