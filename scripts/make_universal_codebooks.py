"""Computes the universal Gaussian codebooks and writes hf_vq/formats/data/universal_v1.safetensors.

    python scripts/make_universal_codebooks.py            # about ten minutes on one core
    python scripts/make_universal_codebooks.py --check    # only re-measures the stored tables

Everything is float64 with fixed seeds; only the result is rounded, once, to float16, and every
mean squared error (MSE, per dimension, data ~ N(0, 1)) is measured after that rounding. Other
versions of numpy or scipy may settle in another optimum of the same quality, which is why the
file, not this script, is the definition of version 1.

1-D   Lloyd-Max, by exact integrals; nested: again within each cell of the first table.
2-D   descent on the exact distortion: the mass and the mean of a Voronoi cell are sums over its
      edges (divergence theorem), in closed form with erf and Owen's T function.
4-D   Lloyd iterations on Sobol points, each with its mirror image.
E8P   QuIP# (arXiv 2402.04396, section 4): see hf_vq/formats/lattice.py for the code layout.

Order of the entries: 1-D ascending (nested: by first code, then ascending); 2-D and 4-D by falling
probability, ties lexicographic, so that the frequent entries come first; E8P patterns by squared
norm, ties lexicographic.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import scipy.optimize  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from scipy.spatial import Voronoi, cKDTree  # type: ignore[import-untyped]
from scipy.special import ndtr, ndtri, owens_t  # type: ignore[import-untyped]
from scipy.stats import qmc  # type: ignore[import-untyped]

from hf_vq.formats.lattice import e8p_decode, e8p_encode, e8p_patterns
from hf_vq.formats.universal import read_universal, refined_name, tensor_hash

Array = NDArray[np.float64]
DATA = Path(__file__).parents[1] / "hf_vq" / "formats" / "data" / "universal_v1.safetensors"
SQRT_2PI = np.sqrt(2.0 * np.pi)


def density(x: Array) -> Array:
    """Density of N(0, 1)."""
    return np.asarray(np.exp(-0.5 * x * x) / SQRT_2PI)


# 1-D ---------------------------------------------------------------------------------------------


def moments_1d(entries: Array, low: float, high: float) -> tuple[Array, Array]:
    """Mass and first moment of the cells that ascending `entries` [n] cut from [low, high]."""
    edges = np.concatenate([[low], 0.5 * (entries[1:] + entries[:-1]), [high]])
    # differences on the left tail, where ndtr keeps its relative precision
    mass = np.where(
        entries > 0, ndtr(-edges[:-1]) - ndtr(-edges[1:]), ndtr(edges[1:]) - ndtr(edges[:-1])
    )
    return mass, density(edges[:-1]) - density(edges[1:])


def lloyd_max(bits: int, low: float = -np.inf, high: float = np.inf) -> Array:
    """The optimal scalar quantizer [2**bits] of N(0, 1) cut to [low, high].

    Newton steps on "entry = mean of its cell", after a few Lloyd rounds.
    """
    n = 2**bits
    start, stop = ndtr(np.array([low, high]) / np.sqrt(3.0))  # entries of density ~ pdf ** (1/3)
    entries = np.sqrt(3.0) * ndtri(start + (stop - start) * (np.arange(n) + 0.5) / n)
    symmetric = low == -high

    def residual(c: Array) -> Array:
        mass, first = moments_1d(c, low, high)
        return c - first / mass

    for _ in range(200):
        entries = entries - residual(entries)
    for _ in range(50):
        edges = 0.5 * (entries[1:] + entries[:-1])
        mass, first = moments_1d(entries, low, high)
        mean = first / mass
        # d mean / d edge on either side of an edge; an edge moves by half of each neighbour
        right = 0.5 * density(edges) * (edges - mean[:-1]) / mass[:-1]
        left = 0.5 * density(edges) * (mean[1:] - edges) / mass[1:]
        jacobian = np.eye(n) - np.diag(right, 1) - np.diag(left, -1)
        jacobian -= np.diag(np.append(right, 0.0)) + np.diag(np.insert(left, 0, 0.0))
        step = np.linalg.solve(jacobian, entries - mean)
        entries = entries - step
        if symmetric:
            entries = 0.5 * (entries - entries[::-1])
        if np.abs(step).max() < 1e-13:
            break
    assert np.abs(residual(entries)).max() < 1e-12
    return np.asarray(entries)


def nested(bits: int, first: Array) -> Array:
    """Refinement of the symmetric table `first`: rows of 2**bits entries, one for each cell.

    Row h is the optimal quantizer of N(0, 1) within the cell of first[h].
    """
    edges = np.concatenate([0.5 * (first[1:] + first[:-1]), [np.inf]])[len(first) // 2 - 1 :]
    right = np.stack([lloyd_max(bits, low, high) for low, high in itertools.pairwise(edges)])
    return np.concatenate([-right[::-1, ::-1], right])


def mse_1d(entries: Array) -> float:
    """Exact MSE of ascending `entries` [n]."""
    mass, first = moments_1d(entries, -np.inf, np.inf)
    return float(1.0 - 2.0 * entries @ first + (entries * entries) @ mass)


def mse_nested(rows: Array, first: Array) -> float:
    """MSE of first[h], then the nearest entry of rows[h]."""
    edges = np.concatenate([[-np.inf], 0.5 * (first[1:] + first[:-1]), [np.inf]])
    saved = 0.0
    for row, low, high in zip(rows, edges[:-1], edges[1:], strict=True):
        mass, mean = moments_1d(row, low, high)
        saved += 2.0 * row @ mean - (row * row) @ mass
    return 1.0 - float(saved)


# 2-D ---------------------------------------------------------------------------------------------


def moments_2d(entries: Array) -> tuple[Array, Array]:
    """Mass [n] and first moment [n, 2] under N(0, I) of each Voronoi cell of `entries` [n, 2].

    mass = flux of r (1 - exp(-r^2/2)) / (2 pi r^2), first moment = -flux of the density. On an edge
    at distance d from the origin, at t along it, the first flux is atan(t/d)/2pi - T(d, t/d).
    """
    n = len(entries)
    far = 1e3 * np.array([[1, 0], [-1, 0], [0, 1], [0, -1], [1, 1], [-1, 1], [1, -1], [-1, -1]])
    points = np.concatenate([entries, far])  # they close every cell, far outside the density
    diagram = Voronoi(points)
    vertices = np.asarray(diagram.ridge_vertices)
    inner = (vertices >= 0).all(1)
    i, j = diagram.ridge_points[inner].T
    start, end = (diagram.vertices[vertices[inner, k]] for k in (0, 1))
    normal = points[j] - points[i]
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    tangent = np.stack([-normal[:, 1], normal[:, 0]], axis=1)
    distance = 0.5 * ((points[i] + points[j]) * normal).sum(1)
    t0, t1 = (start * tangent).sum(1), (end * tangent).sum(1)
    t0, t1 = np.minimum(t0, t1), np.maximum(t0, t1)

    def flux(t: Array) -> Array:
        ratio = t / np.where(distance == 0, 1e-30, distance)
        return np.asarray(np.arctan(ratio) / (2 * np.pi) - owens_t(distance, ratio))

    out = flux(t1) - flux(t0)
    mass = (np.bincount(i, out, len(points)) - np.bincount(j, out, len(points))).astype(np.float64)
    side = density(distance) * (ndtr(t1) - ndtr(t0))
    first = np.stack(
        [
            np.bincount(j, side * normal[:, k], len(points))
            - np.bincount(i, side * normal[:, k], len(points))
            for k in (0, 1)
        ],
        axis=1,
    )
    return mass[:n], first[:n]


def mse_2d(entries: Array) -> float:
    """Exact MSE per dimension of `entries` [n, 2]."""
    mass, first = moments_2d(entries)
    distortion = 2.0 - 2.0 * (entries * first).sum() + ((entries * entries).sum(1) * mass).sum()
    return float(distortion) / 2


def descend_2d(entries: Array, iterations: int) -> Array:
    """A local optimum of the distortion near `entries`: L-BFGS in units of sqrt(cell mass)."""
    unit = 1.0 / np.sqrt(np.maximum(moments_2d(entries)[0], 1e-6))[:, None]
    reach = np.broadcast_to(8.0 / unit, entries.shape).ravel()  # keeps line searches sane

    def distortion(z: Array) -> tuple[float, Array]:
        c = z.reshape(-1, 2) * unit
        mass, first = moments_2d(c)
        value = 2.0 - 2.0 * (c * first).sum() + ((c * c).sum(1) * mass).sum()
        return float(value), (2.0 * (mass[:, None] * c - first) * unit).ravel()

    found = scipy.optimize.minimize(
        distortion,
        np.clip((entries / unit).ravel(), -reach, reach),
        jac=True,
        method="L-BFGS-B",
        bounds=scipy.optimize.Bounds(-reach, reach),
        options={"maxiter": iterations, "ftol": 1e-13, "gtol": 1e-9, "maxcor": 30},
    )
    return np.asarray(found.x).reshape(-1, 2) * unit


def rings(n: int, rng: np.random.Generator) -> Array:
    """About-optimal start: concentric rings whose radii follow density ~ pdf ** (1/2)."""
    count = max(2, round(np.sqrt(n / np.pi)))
    weights = np.arange(count) * 2 * np.pi + rng.uniform(0.5, 4.0)
    sizes = np.maximum(1, np.floor(n * weights / weights.sum())).astype(int)
    sizes[-1] += n - sizes.sum()
    rank = (np.cumsum(sizes) - 0.5 * sizes) / n
    radius = np.sqrt(-4.0 * np.log1p(-rank))  # Rayleigh with variance 2 per axis
    angle = [2 * np.pi * (np.arange(k) + rng.uniform()) / k for k in sizes]
    ring = [np.stack([r * np.cos(a), r * np.sin(a)], 1) for r, a in zip(radius, angle, strict=True)]
    return np.concatenate(ring) + 1e-3 * rng.standard_normal((n, 2))


def grid_2d(bits: int, starts: int, hops: int) -> Array:
    """The best of `starts` descents, improved by `hops` noise injections with fresh descents."""
    n = 2**bits
    rng = np.random.default_rng(20 + bits)
    best, best_mse = np.empty((n, 2)), np.inf
    for k in range(starts + hops):
        if k < starts:
            start = rings(n, rng) if k % 2 else np.sqrt(2.0) * rng.standard_normal((n, 2))
        else:
            start = best + rng.uniform(0.1, 0.6) * np.sqrt(best_mse) * rng.standard_normal((n, 2))
        entries = descend_2d(start, 500 if k < starts else 300)
        if (mse := mse_2d(entries)) < best_mse:
            best, best_mse = entries, mse
    for _ in range(3):
        best = descend_2d(best, 3000)
    return best


# 4-D ---------------------------------------------------------------------------------------------


def sobol(dimension: int, log2_samples: int, seed: int) -> Array:
    """N(0, I) Sobol points and their mirror images [2**log2_samples, dimension]."""
    uniform = qmc.Sobol(dimension, seed=seed).random_base2(log2_samples - 1)
    normal = ndtri(np.clip(uniform, 1e-12, 1 - 1e-12))
    return np.concatenate([normal, -normal])


def cells(samples: Array, entries: Array) -> tuple[Array, Array, Array]:
    """Number [n], sum [n, d] and squared error [n] of the samples nearest to each entry."""
    distance, index = cKDTree(entries).query(samples)
    count, *total, error = (
        np.bincount(index, weight, len(entries))
        for weight in (np.ones(len(samples)), *samples.T, distance * distance)
    )
    return count.astype(np.float64), np.stack(total, axis=1), error.astype(np.float64)


def sampled_mse(samples: Array, entries: Array) -> float:
    """MSE per dimension of `entries` [n, d] on `samples` [m, d]."""
    return float(cells(samples, entries)[2].sum()) / samples.size


def lloyd(entries: Array, samples: Array, rounds: int) -> Array:
    """Lloyd iterations; at first, an entry of little use restarts next to the costliest one."""
    for k in range(rounds):
        count, total, error = cells(samples, entries)
        entries = total / np.maximum(count, 1.0)[:, None]
        if k < rounds // 2 and k % 5 == 4 and error.min() < 0.3 * error.mean():
            entries[error.argmin()] = entries[error.argmax()] * 1.02
    return entries


def grid_4d(bits: int, starts: int) -> Array:
    """The best of `starts` short runs, finished on more samples."""
    small, large = sobol(4, 17, seed=4), sobol(4, 20, seed=5)
    rng = np.random.default_rng(40 + bits)
    spread = np.sqrt((4 + 2) / 4)  # density ~ pdf ** (d / (d + 2))
    runs = [lloyd(spread * rng.standard_normal((2**bits, 4)), small, 60) for _ in range(starts)]
    best = min(runs, key=lambda entries: sampled_mse(small, entries))
    return lloyd(best, large, 40)


# E8P ---------------------------------------------------------------------------------------------


def e8p_book(shift: float) -> torch.Tensor:
    """The codebook [257, 8] of this shift; the scale is 4 shift."""
    return torch.cat([4 * shift * e8p_patterns(), torch.full((1, 8), shift)]).half()


def mse_e8p(codebook: torch.Tensor, samples: torch.Tensor) -> float:
    """MSE per dimension of an E8P codebook [257, 8] on `samples` [m, 8]."""
    found = e8p_decode(e8p_encode(samples, codebook), codebook)
    return float((found.double() - samples).square().mean())


def e8p() -> torch.Tensor:
    """The best scale n/128: with so few digits every entry is exact in float16."""
    samples = torch.from_numpy(sobol(8, 18, seed=8)).float()
    books = [e8p_book(n / 512) for n in range(120, 129)]
    entries = e8p_decode(torch.arange(65536), books[0])
    assert len(torch.unique(entries, dim=0)) == 65536
    return min(books, key=lambda book: mse_e8p(book, samples))


# -------------------------------------------------------------------------------------------------


def ordered(entries: Array, mass: Array) -> Array:
    """By falling probability, ties (to 9 digits) lexicographic."""
    return entries[np.lexsort((*entries.T[::-1], -np.round(mass, 9)))]


def compute() -> dict[str, torch.Tensor]:
    """Every tensor of the file, by name."""
    tables: dict[str, Array] = {f"gauss_1x{b}": lloyd_max(b)[:, None] for b in range(1, 9)}
    for bits, more in itertools.product(range(1, 5), repeat=2):
        first = tables[f"gauss_1x{bits}"][:, 0].astype(np.float16).astype(np.float64)
        tables[f"nested_{refined_name(bits, more)}"] = nested(more, first).reshape(-1, 1)
    for bits, starts, hops in ((4, 40, 20), (6, 100, 100), (8, 40, 20)):
        grid = grid_2d(bits, starts, hops)
        tables[f"gauss_2x{bits}"] = ordered(grid, moments_2d(grid)[0])
    grid = grid_4d(8, starts=3)
    tables["gauss_4x8"] = ordered(grid, cells(sobol(4, 20, seed=5), grid)[0])
    book = e8p()
    half = {name: torch.from_numpy(table).half() for name, table in tables.items()}
    return half | {"e8p_patterns": book[:256].clone(), "e8p_shift": book[256, :1].clone()}


def measure(tables: dict[str, torch.Tensor]) -> dict[str, float]:
    """MSE per dimension of each stored table: exact in 1-D and 2-D, else on 2**20 fresh points."""
    out = {}
    for name, table in tables.items():
        entries = table.double().numpy()
        if name.startswith("gauss_1x"):
            out[name] = mse_1d(entries[:, 0])
        elif name.startswith("nested_1x"):
            name_of_first = name.replace("nested", "gauss").partition("+")[0]
            first = tables[name_of_first][:, 0].double().numpy()
            out[name] = mse_nested(entries.reshape(len(first), -1), first)
        elif name.startswith("gauss_2x"):
            out[name] = mse_2d(entries)
        elif name.startswith("gauss_4x"):
            out[name] = sampled_mse(sobol(4, 20, seed=1004), entries)
    samples = torch.from_numpy(sobol(8, 20, seed=1008)).float()
    out["e8p_patterns"] = mse_e8p(e8p_book(float(tables["e8p_shift"])), samples)
    return out


def main() -> None:
    """Compute or only measure; print a line per table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only measure the stored tables")
    check = parser.parse_args().check
    if check:
        tables = {name: table.tensor for name, table in read_universal(DATA).items()}
    else:
        tables = compute()
    mse = measure(tables)
    about = {}
    for name, table in sorted(tables.items()):
        about[name] = {"sha256": tensor_hash(table)}
        value = f"{mse[name]:.9g}" if name in mse else ""
        if value:
            about[name]["mse"] = value
        print(f"{name:13} {tuple(table.shape)!s:10} {value:13} {about[name]['sha256'][:16]}")
    if not check:
        # one key only: the header's order, and so the file, is then reproducible
        header = {"universal": json.dumps({"version": "1", "tables": about}, sort_keys=True)}
        save_file(dict(sorted(tables.items())), DATA, metadata=header)
        DATA.chmod(0o644)


if __name__ == "__main__":
    main()
