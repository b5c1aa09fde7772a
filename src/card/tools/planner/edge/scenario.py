"""Scenarios of devices, servers and the radio between them: drawn at random, or read from a file.

Source of the model: UARA (arXiv:2511.01695). Path loss and shadowing are those of 3GPP's macro cells (TR 36.814).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from card.errors import PlanError
from card.tools.planner.files import read_file

KIND, VERSION = "edge", 1
Floats = npt.NDArray[np.float64]
Devices = npt.NDArray[np.int64]  # numbers of devices, or the servers of all of them
_LEAST_DISTANCE_M = 10.0
_SIDE_M = 500.0  # of the square
_SHADOWING_DB = 8.0  # standard deviation


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device with a drafter."""

    x_m: float
    y_m: float
    speed: float = 0.1  # of the draft model, relative to the machine of its profile
    tx_dbm: float = 20.0  # power of its sender
    compute_w: float = 2.0  # power of its drafter
    battery: float = 1.0  # charge, above 0 to 1: the lower, the more a joule costs


class EdgeServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server with a target."""

    x_m: float
    y_m: float
    speed: float = 1.0  # of the target, relative to the machine of its profile
    bandwidth_hz: float = 10e6  # shared by its devices


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A place with devices and servers, and how they decode."""

    kind: str = KIND
    version: int = VERSION
    devices: tuple[Device, ...]
    servers: tuple[EdgeServer, ...]
    acceptance: float = 0.8  # how often the drafter's first choice is the target's token
    hit_rate: float = 0.6  # how often another candidate of the tree is right if the first choice is wrong
    kept_share: float = 0.5  # CARD: share of the layers ahead that are kept below such a candidate
    num_speculative_tokens: int = 4  # PEARL: tokens of a window
    budget: int = 8  # CARD: most layers verified in a pass
    lead: int = 16  # CARD: most layers beyond the text that the device knows
    token_bytes: int = 4  # PEARL: sent for each drafted token
    layer_bytes: int = 96  # CARD: sent for each layer, 12 bytes for each of 8 candidates
    one_way_s: float = 0.005  # of any message, besides the time for its length
    noise_dbm_hz: float = -174.0
    least_snr_db: float = -10.0  # a server with less is out of reach
    energy_weight: float = 0.01  # cost of a joule in seconds, with a full battery
    shadowing_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpread:
    """Differences between the servers of a place: log-uniform factors around the middle."""

    compute: float
    bandwidth_hz: float  # the middle
    bandwidth: float
    scale: float = 1.0  # of all distances


NARROW = ServerSpread(compute=8.0, bandwidth_hz=50e3, bandwidth=4.0, scale=3.0)  # a town with radios of sensors
PLACES: dict[str, ServerSpread | None] = {"even": None, "narrow": NARROW}


def draw_scenario(num_devices: int, *, num_servers: int | None = None, seed: int = 0, place: str = "even") -> Scenario:
    """Return devices and servers spread evenly over a square; each device has a server in reach.

    Args:
        num_servers: None: one for nine devices, at least four.
        place: a name of `PLACES`.
    Raises: PlanError for no devices or servers, or an unknown place.
    """
    count = max(4, round(num_devices / 9)) if num_servers is None else num_servers
    if num_devices < 1 or count < 1:
        raise PlanError(f"a scenario needs 1 device and 1 server or more, got {num_devices} and {count}")
    if place not in PLACES:
        raise PlanError(f"a drawn place is one of {', '.join(PLACES)}, got {place!r}")
    rng = np.random.default_rng(seed)
    servers = tuple(
        EdgeServer(x_m=x, y_m=y, speed=speed)
        for x, y, speed in zip(
            *rng.uniform(0, _SIDE_M, (2, count)).tolist(), rng.uniform(0.5, 2, count).tolist(), strict=True
        )
    )
    devices = tuple(
        Device(x_m=x, y_m=y, speed=speed, tx_dbm=power, battery=battery)
        for x, y, speed, power, battery in zip(
            *rng.uniform(0, _SIDE_M, (2, num_devices)).tolist(),
            np.exp(rng.uniform(math.log(0.05), math.log(0.2), num_devices)).tolist(),
            rng.uniform(16, 24, num_devices).tolist(),
            rng.uniform(0.2, 1, num_devices).tolist(),
            strict=True,
        )
    )
    drawn, spread = Scenario(devices=devices, servers=servers, shadowing_seed=seed), PLACES[place]
    return drawn if spread is None else spread_out(drawn, spread)


def spread_out(scenario: Scenario, spread: ServerSpread) -> Scenario:
    """Return the scenario with other servers at the same positions, which are scaled."""
    rng = np.random.default_rng([scenario.shadowing_seed, 1])
    exponents = rng.uniform(-1.0, 1.0, (len(scenario.servers), 2)).tolist()
    servers = (
        replace(one, speed=spread.compute**speed, bandwidth_hz=spread.bandwidth_hz * spread.bandwidth**width)
        for one, (speed, width) in zip(scenario.servers, exponents, strict=True)
    )
    return replace(
        scenario,
        servers=tuple(replace(one, x_m=spread.scale * one.x_m, y_m=spread.scale * one.y_m) for one in servers),
        devices=tuple(replace(one, x_m=spread.scale * one.x_m, y_m=spread.scale * one.y_m) for one in scenario.devices),
    )


def load_scenario(path: Path) -> Scenario:
    """Read a scenario, JSON. Raises: PlanError if it cannot be read, or has impossible values."""
    return read_file(path, Scenario, KIND, VERSION, msgspec.json.decode, check_scenario)


def check_scenario(scenario: Scenario) -> None:
    """Raise PlanError if a scenario has impossible values, or a device has no server in reach."""
    if not scenario.devices or not scenario.servers:
        raise PlanError(f"it needs devices and servers, got {len(scenario.devices)} and {len(scenario.servers)}")
    for name in ("acceptance", "hit_rate", "kept_share"):
        if not 0.0 <= getattr(scenario, name) <= 1.0:
            raise PlanError(f"{name} must be from 0 to 1, got {getattr(scenario, name)}")
    for name in ("num_speculative_tokens", "budget", "lead", "token_bytes", "layer_bytes"):
        if getattr(scenario, name) < 1:
            raise PlanError(f"{name} must be 1 or more, got {getattr(scenario, name)}")
    for name in ("one_way_s", "energy_weight"):
        if not 0.0 <= getattr(scenario, name) < math.inf:
            raise PlanError(f"{name} must be finite and 0 or more, got {getattr(scenario, name)}")
    for idx, device in enumerate(scenario.devices):
        _check_thing(f"device {idx}", device)
    for idx, server in enumerate(scenario.servers):
        _check_thing(f"server {idx}", server)
    in_reach(scenario)


def _check_thing(name: str, thing: Device | EdgeServer) -> None:
    for field in thing.__struct_fields__:
        value = getattr(thing, field)
        if not math.isfinite(value):
            raise PlanError(f"{field} of {name} must be a finite number, got {value}")
        if field in ("speed", "bandwidth_hz", "compute_w", "battery") and value <= 0.0:
            raise PlanError(f"{field} of {name} must be above 0, got {value}")
    if isinstance(thing, Device) and thing.battery > 1.0:
        raise PlanError(f"battery of {name} must be above 0 and at most 1, got {thing.battery}")


def snr(scenario: Scenario) -> Floats:
    """Return the ratio of signal to noise of each device at each server over its whole band, [N, M].

    Source: path loss 128.1 + 37.6 log10(km) dB, shadowing of 8 dB.
    """
    places = np.array([(one.x_m, one.y_m) for one in scenario.devices])
    centres = np.array([(one.x_m, one.y_m) for one in scenario.servers])
    metres = np.maximum(np.linalg.norm(places[:, None] - centres[None], axis=-1), _LEAST_DISTANCE_M)
    shadow = np.random.default_rng(scenario.shadowing_seed).normal(0.0, _SHADOWING_DB, metres.shape)
    power = np.array([one.tx_dbm for one in scenario.devices])[:, None]
    noise = scenario.noise_dbm_hz + 10.0 * np.log10([one.bandwidth_hz for one in scenario.servers])
    decibels = power - (128.1 + 37.6 * np.log10(metres / 1000.0) + shadow) - noise
    ratios: Floats = 10.0 ** (decibels / 10.0)
    return ratios


def in_reach(scenario: Scenario) -> npt.NDArray[np.bool_]:
    """Return which servers each device can use, [N, M]. Raises: PlanError for a device that has none."""
    decibels = 10.0 * np.log10(snr(scenario))
    reach: npt.NDArray[np.bool_] = decibels >= scenario.least_snr_db
    alone = np.flatnonzero(~reach.any(axis=1))
    if alone.size:
        idx = int(alone[0])
        raise PlanError(
            f"device {idx} has no server in reach: its best signal is {decibels[idx].max():.1f} dB over the noise, and "
            f"least_snr_db is {scenario.least_snr_db:g}; move it, or raise its tx_dbm"
        )
    return reach
