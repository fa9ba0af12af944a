"""The support matrix: what each function of the table does, for every way a tensor may be split.

`python tests/tensor/support.py` (`make support`) finds it on three and four workers and
writes `docs/support.md`; `test_support.py` compares.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import filter as filter_names
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "common"))  # when run as a script

import spread_elements as elements
import tessel
from spread_cases import Case
from tessel import Layout
from tessel.tensor import gathering
from tessel.tensor.gathering import GatherWarning
from tessel.tensor.table import FOUND, RULES
from tessel.transport import kept_in_job
from test_spread import CASES, Verdict, check, partition
from test_spread_random import FUNCTIONS, SHAPE, drawn

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
WORKERS = (3, 4)  # three for one dimension that is split, four for two
IS_TESTED = torch.__version__ >= (2, 13)  # earlier versions have fewer functions
BY_CHANCE = "Random functions"  # a section
NUM_DIMS = 5
COLUMNS = (*map(str, range(NUM_DIMS)), "two", "uneven", "others")

# Functions, as the page names them, and the cases that call them. A pattern stands for all cases
# whose names fit. What a function does may depend on its arguments: then it has several rows.
Rows = dict[str, Sequence[str]]

ELEMENTS: Rows = {
    elements.ANY: ["of any number"],
    elements.STEPS: ["jumps"],
    elements.ABOVE: ["of positive numbers"],
    f"{elements.UNIT} acosh polygamma mvlgamma": ["of numbers up to one", "gammas"],
    f"{elements.ACTIVATIONS} F.hardsigmoid F.threshold": ["activations*"],
    "F.prelu": ["prelu", "prelu with *"],
    elements.TWO: ["of two*", "of a tensor and a row", "operators"],
    f"{elements.QUOTIENTS} {elements.POWERS} ldexp igamma igammac": [
        "quotients",
        "powers",
        "incomplete gammas",
    ],
    f"{elements.COMPARISONS} {elements.LOGIC}": ["comparison*", "logic"],
    f"{elements.BITS} bitwise_not": ["bits"],
    "addcmul addcdiv lerp where clamp clip clamp_min clamp_max masked_fill": [
        *("of three", "clamp", "masked_fill*", "where"),
    ],
    "add_ mul_ exp_ fill_ zero_ masked_fill_ …": ["in place*"],
    "complex polar real imag conj_physical resolve_conj resolve_neg angle": ["complex numbers"],
    "Tensor.to Tensor.float Tensor.type_as clone Tensor.contiguous Tensor.detach": [
        *("types", "clone"),
    ],
    "special.entr special.erfcx special.ndtr special.xlog1py special.zeta …": ["special*"],
    "frexp isin": ["frexp", "isin"],
}

FACTORIES: Rows = {
    "zeros_like ones_like full_like empty_like": ["like"],
    "Tensor.new_zeros Tensor.new_ones Tensor.new_full Tensor.new_empty Tensor.new_tensor": [
        "new",
        "new ones",
        "new tensors",
    ],
    "zeros arange linspace eye as_tensor meshgrid, in a model": ["made in a model"],
    "plain.copy_(x); plain.add_(x)": ["written into a plain tensor"],
    "meshgrid": ["meshgrid"],
}

REDUCTIONS: Rows = {
    "sum mean nansum nanmean count_nonzero": ["sum*", "mean", "nansum", "nanmean", "count_nonzero"],
    "amax amin aminmax": ["amax*", "amin*", "aminmax"],
    "max min argmax argmin": [
        "max",
        "max along*",
        "max with k*",
        "max of*",
        "min",
        "min along*",
        "arg[!s]*",
    ],
    "prod all any": ["prod", "all and any", "reductions of nothing*"],
    "logsumexp": ["logsumexp*"],
    "var std var_mean std_mean": ["var*", "std*"],
    "norm linalg.vector_norm dist": ["norm [0-9a-]*", "dist"],
    "F.normalize": ["normalize"],
    "softmax log_softmax F.softmin": ["softmax*", "log_softmax*", "softmin*"],
    "cumsum cumprod cummax cummin logcumsumexp": ["cumsum*", "cumprod*", "cumm*", "logcumsumexp*"],
    "sort argsort msort": ["sort", "argsort", "msort"],
    "topk kthvalue mode": ["topk", "kthvalue", "mode"],
    "median nanmedian": ["median", "nanmedian"],
    "diff": ["diff*"],
    "F.glu": ["glu"],
    "quantile nanquantile": ["quantile*", "nanquantile"],
    "cov corrcoef": ["cov"],
    "renorm": ["renorm"],
    "histc bincount": ["histc", "bincount*"],
    "masked.sum masked.mean masked.amax masked.softmax …": ["masked s*"],
    "distributions.Normal …, which check their arguments": [
        *("checks of distributions", "truths for checks"),
    ],
    "trapezoid cumulative_trapezoid": ["trapezoid*", "cumulative_trapezoid"],
    "gradient": ["gradient"],
    "unique": ["unique"],
}

PRODUCTS: Rows = {
    "matmul mm bmm mv dot vdot @": [
        *("*matmul*", "vector*", "mm", "mv", "bmm", "vdot*", "matrix and*"),
    ],
    "outer ger inner": ["outer", "ger", "inner"],
    "einsum": ["einsum*"],
    "tensordot": ["tensordot*"],
    "addmm addmv addbmm baddbmm addr": ["addmm", "addmv", "addbmm", "baddbmm", "addr*"],
    "F.linear": ["linear", "linear *"],
    "F.bilinear": ["bilinear"],
    "linalg.multi_dot linalg.matrix_power linalg.vecdot linalg.cross kron": [
        *("multi_dot", "matrix_power", "vecdot", "cross*", "kron", "other names"),
    ],
    "linalg.norm linalg.matrix_norm": ["matrix_norm"],
    "linalg.inv linalg.det linalg.solve linalg.cholesky linalg.qr matrix_exp logdet": [
        *("inv*", "solve", "logdet", "cholesky", "qr", "matrix_exp"),
    ],
    "linalg.svd linalg.svdvals linalg.eigh linalg.eigvalsh linalg.eig linalg.pinv": [
        *("svd", "svdvals", "eig", "eigh", "eigvalsh"),
    ],
    "cartesian_prod": ["cartesian_prod"],
    "@ mv sparse.mm sparse.addmm, of sparse matrices that all workers have": ["sparse products*"],
    "vander": ["vander"],
    "cdist F.pairwise_distance F.cosine_similarity": [
        *("cdist 2*", "pairwise_distance", "cosine_similarity*"),
    ],
    "F.pdist": ["pdist"],
}

SHAPES: Rows = {
    "Tensor.view reshape flatten unflatten ravel Tensor.view_as Tensor.reshape_as": [
        *(
            "all reshapes of (4, 3)",
            "all reshapes of (2, 2, 3)",
            "reshapes of nothing in (3, 0)",
            "flatten",
            "heads",
            "heads and back",
            "view",
        ),
        "unflatten",
    ],
    "squeeze unsqueeze": ["squeeze*", "unsqueeze"],
    "Tensor.squeeze_ Tensor.unsqueeze_ Tensor.transpose_ Tensor.swapaxes_ Tensor.t_": ["shapes *"],
    "permute transpose movedim swapaxes Tensor.T Tensor.mT Tensor.H adjoint": [
        *("movedim", "moveaxis", "transposed", "adjoint*"),
    ],
    "Tensor.expand Tensor.expand_as broadcast_to broadcast_tensors": [
        *("expand*", "broadcast_t*"),
    ],
    "atleast_1d atleast_2d atleast_3d": ["atleast"],
    "Tensor.repeat tile": ["repeat", "repeat of*", "repeat nothing"],
    "repeat_interleave": ["repeat_interleave*"],
    "rot90": ["rot90"],
    "F.pixel_shuffle F.pixel_unshuffle F.channel_shuffle": ["pixel_*", "*channel_shuffle"],
    "view_as_real view_as_complex, Tensor.view of another type": ["view_as_*", "view as another*"],
    "Tensor.unfold": ["Tensor.unfold*"],
    "F.unfold F.fold": ["F.*fold*"],
    "cat concat": ["cat *", "concat"],
    "stack hstack vstack dstack column_stack row_stack": ["stack", "stack within", "hstack*"],
    "chunk split tensor_split unbind hsplit vsplit dsplit": [
        *("pieces*", "hsplit*", "split_with_sizes", "tensor_split*", "iteration"),
    ],
    "roll": ["roll"],
    "flip fliplr flipud": ["flip*"],
    "F.pad, constant": ["pad constant*", "pad with*"],
    "F.pad, reflect": ["pad reflect*"],
    "F.pad, replicate": ["pad replicate*"],
    "F.pad, circular": ["pad circular*"],
    "tril triu Tensor.fill_diagonal_": ["triangles*", "fill_diagonal_*"],
    "diagonal diag diag_embed diagflat trace": ["diag*", "trace"],
    "block_diag": ["block_diag"],
}

INDEXING: Rows = {
    "x[1:3]; x[::2]; x[-1]; x[None]; narrow; select": [
        *("numbers", "slices", "steps", "new dimensions", "numpy numbers", "narrow*"),
    ],
    "x[index]; x[[0, 2]]; index_select; take": [
        *(
            "lists",
            "arrays of indices",
            "tensors of*",
            "index without*",
            "index_select",
            "spread index*",
        ),
    ],
    "x[index, :, index]": ["several tensors of indices"],
    "Tensor.scatter_add_ Tensor.scatter_reduce_, in message passing": [
        *("graph convolution*", "graph attention*", "sums over graphs"),
    ],
    "index_select index_add scatter_add scatter_reduce, of rows": [
        "rows *",
        "scatter_reduce of rows*",
        "an index that is*",
    ],
    "x[True]": ["truth values"],
    "nonzero argwhere, where of a condition": ["nonzero", "where of a condition"],
    "x[mask]": ["mask of all", "mask of rows", "mask of columns", "mask beside slices"],
    "masked_select": ["masked_select"],
    "gather take_along_dim": ["gather*", "take_along*", "argsort and gather"],
    "scatter scatter_add scatter_reduce": ["scatter [!r]*", "scatter_reduce", "scatter_reduce in*"],
    "index_add index_copy index_fill index_reduce": [
        "index functions*",
        "index_add in*",
        "index_[cfr]*",
    ],
    "index_put": ["index_put*"],
    "select_scatter slice_scatter": ["select_scatter"],
    "masked_scatter masked_scatter_": ["masked_scatter", "masked_scatter_"],
    "Tensor.put": ["put"],
    "x[1:3] = y; x[…, ::2] = 1": [
        "number at [!ai]*",
        "tensor at a*",
        "tensor at the*",
        "tensor with*",
        "row to all",
        "plain*",
        "augm*",
    ],
    "x[index] = 1": ["number at a list", "number at indices*", "arrays of places*"],
    "x[index] = y": ["tensor at indices*", "row at indices"],
    "x[mask] = 1": ["where a mask*", "truth values that*", "a number that*"],
    "Tensor.copy_": ["copy_*"],
}

LAYERS: Rows = {
    **{f"F.conv{D}d": [f"conv{D}d", f"conv{D}d *"] for D in (1, 2, 3)},
    **{f"F.conv_transpose{D}d": [f"conv_transpose{D}d*"] for D in (1, 2, 3)},
    "conv_tbc": ["conv_tbc"],
    **{f"F.avg_pool{D}d": [f"avg_pool{D}d*"] for D in (1, 2, 3)},
    **{f"F.max_pool{D}d": [f"max_pool{D}d*"] for D in (1, 2, 3)},
    **{f"F.adaptive_avg_pool{D}d": [f"adaptive_avg_pool{D}d"] for D in (1, 2, 3)},
    **{f"F.adaptive_max_pool{D}d": [f"adaptive_max_pool{D}d*"] for D in (1, 2, 3)},
    "F.lp_pool1d F.lp_pool2d F.lp_pool3d": ["lp_pool*"],
    "F.max_unpool1d F.max_unpool2d F.max_unpool3d": ["max_unpool*"],
    **{
        f"F.interpolate, {mode}": [f"interpolate {mode} [123]*"]
        for mode in (
            *("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area"),
        )
    },
    "F.upsample": ["upsample"],
    "F.interpolate, antialias": ["interpolate * with antialias"],
    "F.grid_sample": ["grid_sample bilinear zeros", "grid_sample of points"],
    "F.affine_grid": ["affine_grid*"],
    "F.batch_norm F.instance_norm F.group_norm": [
        *("batch_norm*", "instance_norm", "group_norm", "norms with*"),
    ],
    "F.layer_norm F.rms_norm": ["layer_norm*", "rms_norm"],
    "F.local_response_norm": ["local_response_norm"],
    "F.embedding": ["embedding", "embedding with padding", "embedding of*"],
    "F.embedding_bag": ["embedding_bag*"],
    "F.one_hot": ["one_hot"],
    "nn.RNN nn.LSTM nn.GRU": [
        *("RNN of one layer", "RNN of relu", "LSTM of one layer", "GRU of one layer"),
    ],
    "nn.RNNCell nn.LSTMCell nn.GRUCell": ["RNNCell", "RNNCell of relu", "LSTMCell", "GRUCell"],
    "bucketize searchsorted": ["bucketize", "searchsorted*"],
}

ATTENTION: Rows = {
    "F.scaled_dot_product_attention": [
        *("attention", "attention causal", "attention of [gt]*", "attention with*"),
    ],
    "nn.MultiheadAttention": ["attention of heads", "heads across", "heads with padding"],
    "nn.TransformerEncoderLayer nn.TransformerDecoderLayer": [
        "encoder in*",
        "decoder",
        "stack of*padding",
    ],
}

LOSSES: Rows = {
    "F.mse_loss F.l1_loss F.smooth_l1_loss F.huber_loss": [
        *("mse_loss*", "l1_loss* mean", "smooth* mean", "huber* mean", "mse with*"),
        *("weighted* sum", "a plain input"),
    ],
    "F.kl_div F.poisson_nll_loss F.gaussian_nll_loss": [
        "kl_div* mean",
        "kl_div batch*",
        "poisson*mean",
        "gaussian*mean",
    ],
    "F.binary_cross_entropy F.binary_cross_entropy_with_logits": ["bce*mean"],
    "F.soft_margin_loss F.hinge_embedding_loss F.margin_ranking_loss": [
        *("soft_margin mean", "hinge* none", "margin_ranking* sum"),
    ],
    "F.nll_loss": ["nll (4, 5) mean", "nll*2, 4) [mn]*"],
    "F.cross_entropy": ["cross_entropy (4, 5) mean", "cross_entropy*2, 4) [mn]*"],
    "F.linear_cross_entropy": ["linear_cross_entropy*"],
    "F.multi_margin_loss F.multilabel_margin_loss F.multilabel_soft_margin_loss": [
        "multi*margin*mean"
    ],
    "F.cosine_embedding_loss F.triplet_margin_loss F.triplet_margin_with_distance_loss": [
        *("cosine_embedding mean", "triplet mean", "triplet with*"),
    ],
    "F.ctc_loss": ["ctc*"],
}

FOURIER: Rows = {
    f"fft.{kind} fft.{kind}2 fft.{kind}n": [
        f"{kind} along * of None None",
        f"{kind} along 1 of 8 *",
        f"{kind}[2n] *",
    ]
    for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
} | {
    "fft.fftshift fft.ifftshift": ["fftshift", "ifftshift"],
    "fft.fft fft.ifftn fft.irfft2 fft.hfftn, complex numbers": [
        "complex input",
        "there and back",
        "a filter",
        "of one dimension",
    ],
    "stft istft": ["stft", "istft*"],
}

# of the functions of `test_spread_random.py`
RANDOM: Rows = {
    "rand_like randn_like randint_like": ["rand*_like*"],
    "F.dropout F.alpha_dropout native_dropout": [
        "dropout",
        "dropout_",
        "dropout [oi]*",
        "alpha*",
        "native*",
    ],
    "F.dropout1d F.dropout2d F.dropout3d F.feature_alpha_dropout": ["dropout?d*", "feature*"],
    "bernoulli Tensor.bernoulli_": ["bernoulli*"],
    "Tensor.normal_ Tensor.uniform_ Tensor.random_ Tensor.exponential_ Tensor.log_normal_ "
    "Tensor.cauchy_ Tensor.geometric_": [
        *("normal_", "uniform_", "random_*", "exponential_", "log_normal_", "cauchy_"),
        "geometric_",
    ],
    "normal": ["normal", "normal of two"],
    "F.rrelu": ["rrelu*"],
    "F.gumbel_softmax": ["gumbel*"],
    "multinomial": ["multinomial*"],
    "F.scaled_dot_product_attention, dropout": ["attention with dropout", "heads with dropout"],
    "nn.LSTM nn.GRU, dropout": ["LSTM with dropout", "GRU with dropout"],
    "poisson binomial": ["poisson", "binomial"],
    "gamma and Dirichlet distributions": ["_standard_gamma", "_sample_dirichlet"],
    "F.fractional_max_pool2d F.fractional_max_pool3d": ["fractional*"],
}

REFUSED: Rows = {
    "x[1:].zero_(); x[1:] += 1": ["view of a split*"],
    "Tensor.put_": ["put in place"],
    "Tensor.normal_, generator": ["fill with*"],
    "F.embedding, max_norm": ["embedding with a largest norm"],
}

SECTIONS: dict[str, Rows] = {
    "Elementwise functions": ELEMENTS,
    "Factories": FACTORIES,
    "Reductions, sorting, statistics": REDUCTIONS,
    "Products, matrices, distances": PRODUCTS,
    "Shapes": SHAPES,
    "Indices": INDEXING,
    "Layers": LAYERS,
    "Attention": ATTENTION,
    "Losses": LOSSES,
    "Fourier transforms": FOURIER,
    BY_CHANCE: RANDOM,
    "Functions that raise": REFUSED,
}

# functions of the table that say what a tensor is, or read its values: `test_tensor.py` has them
FACTS = {name for name, rule in RULES.items() if rule.__module__ == "tessel.tensor.attributes"}
FACTS |= {"__matmul__", "__rmatmul__", "vector_norm", "upsample"}  # of other versions
FACTS |= {"cuda"}  # which needs a GPU: tests/cuda


# -- what there is to find ------------------------------------------------------------------------


@dataclass
class Cell:
    """What a function does, the worst of several cases: exact, gathers, raises, wrong."""

    kind: str = "exact"
    said: set[str] = field(default_factory=set)

    def add(self, kind: str, said: str = "") -> None:
        kinds = ("exact", "gathers", "raises", "wrong")
        self.kind = max(self.kind, kind, key=kinds.index)
        if said:
            self.said.add(said)


Line = dict[str, Cell]  # by column
Found = dict[str, dict[str, Line]]  # by section and functions


def fitting(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that fit any of the patterns, each of which must fit one."""
    known = {*names}
    found = known & {*patterns}  # most are names: every worker asks for hundreds of them
    for pattern in {*patterns} - found:
        fit = filter_names(names, pattern)
        assert fit, f"no case fits {pattern!r}"
        found.update(fit)
    return [name for name in names if name in found]


@kept_in_job
def layouts(shape: tuple[int, ...], workers: int) -> list[tuple[str, Layout]]:
    """How a tensor may lie on all workers, with the columns that say so."""
    return [*(_in_pairs(shape) if workers == 4 else _in_rows(shape))]


def _in_pairs(shape: tuple[int, ...]) -> Iterator[tuple[str, Layout]]:
    square, D = partition([2, 2]), len(shape)
    for a, b in sorted({(0, 1), (D - 2, D - 1), (0, D - 1)}) if D > 1 else ():
        axes = [0 if d == a else 1 if d == b else None for d in range(D)]
        yield "two", Layout.split(square, shape, axes)


def _in_rows(shape: tuple[int, ...]) -> Iterator[tuple[str, Layout]]:
    row, D = tessel.world(), len(shape)
    for dim in range(D):
        yield str(dim), Layout.split(row, shape, _axes(D, dim))
    for dim in {0, D - 1} if D else ():
        lengths = [max(0, shape[dim] - 1), min(1, shape[dim]), 0]
        grid = partition([3 if d == dim else 1 for d in range(D)])
        parts = [lengths if d == dim else [n] for d, n in enumerate(shape)]
        yield "uneven", Layout.from_lengths(grid, parts)


def _axes(ndim: int, dim: int) -> list[int | None]:
    return [0 if d == dim else None for d in range(ndim)]


def beside(case: Case) -> Iterator[list[Layout | None]]:
    """The first operand and all others split, along each of their dimensions."""
    row = tessel.world()
    first, *others = case.shapes
    if not first:
        return
    for dim in range(max((len(shape) for shape in others), default=0)):
        yield [
            Layout.split(row, first, _axes(len(first), 0)),
            *(
                Layout.split(
                    row, shape, [0 if d == dim % len(shape) else None for d in range(len(shape))]
                )
                if shape
                else None
                for shape in others
            ),
        ]


def looks_at(name: str, lying: Sequence[Layout | None]) -> bool:
    """Whether the matrix has a case that lies so, with plain tensors beside the first operand."""
    first, *others = lying
    if not IS_TESTED or name not in _names() or any(each is not None for each in others):
        return False
    case, workers = CASES[name], tessel.world().size
    return any(
        first == layout and derives(case, column, layout)
        for column, layout in layouts(case.shapes[0], workers)
    )


def derives(case: Case, column: str, layout: Layout) -> bool:
    """Whether gradients are compared: most are in `test_spread.py`, with other tensors split.

    Here are those of uneven parts and where there are no others, or plain ones: it leaves these
    out, since it would do the same. Of the first dimension, and of uneven parts of the last one, it
    has second derivatives.
    """
    is_same = len(case.shapes) == 1 or case.plain_others
    if column == "uneven":
        is_twice = layout.is_split(-1) and case.shapes[0][-1] > 1
        return not (is_same and is_twice)
    return is_same and column != "0"


@cache
def _names() -> set[str]:
    rows = [row for section, row in SECTIONS.items() if section != BY_CHANCE]
    patterns = [each for row in rows for some in row.values() for each in some]
    return {*fitting(patterns, list(CASES))}


def look(line: Line, name: str) -> None:
    """Call one case in all ways."""
    case = replace(CASES[name], order=1)
    forward = replace(case, derives=False)
    plain: list[Layout | None] = [None] * (len(case.shapes) - 1)
    workers = tessel.world().size
    ways = [(column, [first, *plain]) for column, first in layouts(case.shapes[0], workers)]
    if workers == 3:
        ways += [("others", each) for each in beside(case)]
    for column, lying in ways:
        if column == "others":
            case = replace(case, may_gather=True, may_raise=True)
        cell = line.setdefault(column, Cell())
        verdict = Verdict()
        try:
            derived = derives(case, column, lying[0])  # type: ignore[arg-type]
            check(name, case if derived else forward, lying, verdict)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            verdict.raises[name] = str(error)
        for wrong in verdict.wrong:
            cell.add("wrong", wrong)
        for said in verdict.raises.values():
            cell.add("raises", shortened(said))
        for said in verdict.gathers.values():
            cell.add("gathers", said.split("`")[1])
        cell.add("exact")


def look_at_chance(line: Line, name: str) -> None:
    """A random function draws what it draws for a tensor that is whole."""
    expected = drawn(FUNCTIONS[name], Layout.whole(tessel.world(), SHAPE, shared=True))
    for column, layout in layouts(SHAPE, tessel.world().size):
        cell = line.setdefault(column, Cell())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gathering._said.clear()
            try:
                got = drawn(FUNCTIONS[name], layout)
            except (NotImplementedError, ValueError, RuntimeError) as error:
                cell.add("raises", shortened(str(error)))
                continue
        if any(issubclass(each.category, GatherWarning) for each in said):
            cell.add("gathers")
        for a, b in zip(got, expected, strict=True):
            if a.shape != b.shape or not torch.allclose(a, b, 1e-12, 1e-12):
                cell.add("wrong", f"{name} of {layout}")
        cell.add("exact")


def shortened(said: str) -> str:
    """The function and the reason in an error."""
    match = re.match(r"torch's (`\w+`)[^:]*: (.*?), got ", said)
    return f"{match[1]}: {match[2]}" if match else said.partition("; ")[0]


def find(section: str) -> tuple[dict[str, Line], set[str]]:
    """A section of the matrix, and the rules of the table that were followed for it."""
    followed: set[str] = set()
    rules, known = dict(RULES), dict(FOUND)
    RULES.update({name: _noting(name, rule, followed) for name, rule in rules.items()})
    try:
        lines: dict[str, Line] = {}
        for functions, patterns in SECTIONS[section].items():
            line = lines[functions] = {}
            is_random = section == BY_CHANCE
            names = fitting(patterns, list(FUNCTIONS if is_random else CASES))
            for name in names:
                (look_at_chance if is_random else look)(line, name)
    finally:
        RULES.update(rules)
        FOUND.clear()  # functions that were first met here are known by rules that note
        FOUND.update(known)
    return lines, followed


def _noting(name: str, rule: Callable[..., Any], followed: set[str]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        followed.add(name)
        return rule(*args)

    return noted


# -- the page -------------------------------------------------------------------------------------

HEAD = """# What is supported

What each torch function does with a [spread tensor](tensors.md), for every way to split its first
argument. `tests/tensor/support.py` determines this on three workers, and on four for two dimensions
that are split, by comparing values and gradients with those of one process. `make support`
regenerates this page, and a test checks it.

- **✓**: the function has a rule: workers exchange what they need, and the result is exact.
- **gathers**: every worker computes with the whole operands, after a `GatherWarning`; the result is
  also exact.
- **raises**: on all workers, before anything is computed; a note below the table says why.

The numbered columns are the dimensions of the first argument, one of which is split at a time;
*two*: two dimensions are split, the first two, the last two, or the first and the last; *uneven*:
the first or the last dimension is split, into parts of all but one, of one and of no values;
*others*: the other tensors among the arguments (weights, targets, indices) are also split, along
any of their dimensions. In all other columns these are plain.
"""


def page(found: Found) -> str:
    """The text of the page."""
    return "\n".join([HEAD, *(table(*each) for each in found.items())])


def table(section: str, lines: dict[str, Line]) -> str:
    """A section of the page: its table, and notes."""
    notes: dict[str, int] = {}
    columns = [each for each in COLUMNS if any(each in line for line in lines.values())]
    text = [f"## {section}\n"]
    text.append(f"| function | {' | '.join(columns)} |")
    text.append(f"|---|{':-:|' * len(columns)}")
    for functions, line in lines.items():
        cells = [_shown(line[each], notes) if each in line else "" for each in columns]
        text.append(f"| {_named(functions)} | {' | '.join(cells)} |")
    if notes:
        text.append("")
        text += [f"{number}. {_escaped(said)}" for said, number in notes.items()]
    return "\n".join([*text, ""])


def _shown(cell: Cell, notes: dict[str, int]) -> str:
    if cell.kind == "exact":
        return "✓"
    if cell.kind != "raises":
        return cell.kind
    numbers = sorted(notes.setdefault(said, len(notes) + 1) for said in sorted(cell.said))
    return f"raises ({', '.join(map(str, numbers))})"


def _named(functions: str) -> str:
    """Names of functions as code; after a comma, words."""
    if functions.startswith("x[") or "; " in functions:
        return ", ".join(f"`{each}`" for each in functions.split("; "))
    names, comma, words = functions.partition(", ")
    if " of " in names or " and " in names:  # words alone
        return functions
    return ", ".join("…" if each == "…" else f"`{each}`" for each in names.split()) + comma + words


def _escaped(said: str) -> str:
    return said.replace("|", "\\|").replace("\n", " ")


def find_all(run: Callable[..., list[Any]], section: str) -> tuple[dict[str, Line], set[str]]:
    """A section of the matrix, and the rules that were followed; `run` is that of a pool."""
    by_rows, in_pairs = (run(find, section, nprocs=n, timeout=280) for n in WORKERS)
    lines = {name: line | agreed(in_pairs)[name] for name, line in agreed(by_rows).items()}
    return lines, by_rows[0][1] | in_pairs[0][1]


def agreed(of_workers: Sequence[tuple[dict[str, Line], set[str]]]) -> dict[str, Line]:
    """What the workers found, who must agree; nothing of it may be wrong."""
    lines = of_workers[0][0]
    for worker, (each, _) in enumerate(of_workers):
        differing = {name: (lines[name], each[name]) for name in lines if each[name] != lines[name]}
        assert not differing, f"workers 0 and {worker} differ: {differing}"
    cells = [cell for line in lines.values() for cell in line.values()]
    wrong = [said for cell in cells if cell.kind == "wrong" for said in sorted(cell.said)]
    assert not wrong, "\n".join(wrong)
    return lines


if __name__ == "__main__":
    from support import find_all as find_section  # so that workers import this file by its name
    from tessel.testing.pool import WorkerPool

    with WorkerPool() as pool:
        PAGE.write_text(page({each: find_section(pool.run, each)[0] for each in SECTIONS}))
