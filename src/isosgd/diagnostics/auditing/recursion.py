"""What a described loop does to a quadratic potential, exactly: its steps are then a linear recursion."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from isosgd.diagnostics.auditing.loop import Loop
from isosgd.samplers.steppers import variance_inflation

Matrix = NDArray[np.float64]


def temperature_at(loop: Loop, curvature: float, gradient_noise: float = 0.0) -> float:
    """Variance of theta at the ends of periods, times N h: the temperature that draws show.

    The state is (theta, v, xi); over a period it is mapped by F and gains the covariance Q. Its stationary covariance
    solves ``S = F S F' + Q``. This holds at any rate, so that it knows the error of discrete steps.

    Args:
        loop: the rule.
        curvature: h of f / N.
        gradient_noise: Var(g), in units of the mean gradient; independent from step to step.

    Returns:
        The temperature; infinite where the steps are unstable.

    Example:
        >>> round(temperature_at(Loop(num_data=100, lr=0.04, noise="sqrt(2*lr/N)"), 1.0), 4)  # 1 / (1 - lr h / 2)
        1.0204
    """
    scale = loop.lr * loop.scale
    if loop.averaged:
        return _averaged(loop, scale * curvature, scale**2 * gradient_noise)
    sigma = loop.sigma / math.sqrt(loop.replicas)
    on_velocity, on_theta = (sigma, 0.0) if loop.noise_on == "velocity" else (0.0, sigma)
    run = loop.reused if loop.shared_noise == "steps" else 1
    kick = _matrix([1, 0, 0], [-scale * curvature, loop.momentum, on_velocity], [0, 0, 1])
    move = _matrix([1, 1, on_theta], [0, 1, 0], [0, 0, 1])
    heat = 0.0 if loop.corrected else scale**2 * gradient_noise
    step = [(kick, np.diag([0.0, heat, 0.0])), (move, np.zeros((3, 3)))]
    if loop.order == "move":
        step.reverse()
    whole, gained = np.eye(3), np.zeros((3, 3))
    for t in range(loop.period):
        parts = list(step)
        if loop.refresh_every is not None and t % loop.refresh_every == 0:
            parts.insert(0, (np.diag([1.0, 0.0, 1.0]), np.diag([0.0, loop.fresh**2, 0.0])))
        if t % run == 0:
            parts.insert(0, (np.diag([1.0, 1.0, 0.0]), np.diag([0.0, 0.0, 1.0])))
        for matrix, added in parts:
            whole, gained = matrix @ whole, matrix @ gained @ matrix.T + added
    if np.abs(np.linalg.eigvals(whole)).max() >= 1.0:
        return math.inf
    stationary = np.linalg.solve(np.eye(9) - np.kron(whole, whole), gained.ravel()).reshape(3, 3)
    return float(stationary[0, 0]) * loop.num_data * curvature


def _averaged(loop: Loop, step: float, heat: float) -> float:
    """Averaged innovations have no error of their own; gradient noise, which is not averaged, has that of its share."""
    injected, added = loop.sigma**2 / loop.replicas, heat
    if loop.corrected:
        injected -= min(added, injected)
    share = added / (injected + added) if added else 0.0
    variance = (injected + added) * variance_inflation(step, share=share)
    return loop.num_data * variance / (2.0 * loop.lr * loop.scale)


def _matrix(*rows: list[float]) -> Matrix:
    return np.array(rows, dtype=np.float64)
