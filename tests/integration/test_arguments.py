"""What the user gives is refused where it is given: with field, rule, value and remedy, before any rank waits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import ConfigurationError, DurationError, InitMethodError, OptionError, WorldError

TCP = "tcp://127.0.0.1:29500"


def refusal(kind: type[ConfigurationError], **arguments: Any) -> str:
    with pytest.raises(kind) as refused:
        DDPExtStrategy(**arguments)
    return str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"rank": 2, "world_size": 2},
            "rank must be in 0..1 for world_size 2 (got 2); count the ranks from 0 (source: arguments)",
        ),
        (
            {"rank": -1, "world_size": 2},
            "rank must be in 0..1 for world_size 2 (got -1); count the ranks from 0 (source: arguments)",
        ),
        ({"rank": 1}, "world_size must be given too (got rank=1 alone); write rank=0, world_size=2 on rank 0"),
        ({"world_size": 2}, "rank must be given too (got world_size=2 alone); write rank=0, world_size=2 on rank 0"),
    ],
)
def test_a_rank_that_cannot_be(arguments: dict[str, int], message: str) -> None:
    """Rank and world size must come together and fit together."""
    assert refusal(WorldError, init_method=TCP, **arguments) == message


@pytest.mark.parametrize("run_id", [42, ""])
def test_a_run_id_that_names_no_file(run_id: object) -> None:
    """It is refused where it is given, and not when the ranks are started."""
    message = refusal(InitMethodError, run_id=run_id)
    assert message == f"run_id must be text, and not empty (got {run_id!r}); write run_id='run42'"


@pytest.mark.parametrize("field", ["init_timeout", "timeout"])
@pytest.mark.parametrize("value", [0, -1, -0.5, timedelta(0), timedelta(seconds=-3), float("nan")])
def test_a_timeout_that_is_not_positive(field: str, value: object) -> None:
    """Both timeouts must be positive, be they seconds or a timedelta."""
    message = refusal(DurationError, **{field: value})
    assert message == (
        f"{field} must be a positive number of seconds, at least 0.001 (got {value!r}); write {field}=60 for a minute"
    )


def test_a_timeout_that_is_no_number() -> None:
    """A text is no duration, even where it looks like one."""
    message = refusal(DurationError, init_timeout="5m")
    assert message.startswith(
        "init_timeout must be seconds or a timedelta (got '5m', of type str); write init_timeout=60"
    )


def test_no_init_timeout_at_all() -> None:
    """A start-up without a limit could hang, so ``null`` in a configuration file stands for the default."""
    assert DDPExtStrategy(init_timeout=None).init_timeout == DDPExtStrategy().init_timeout  # type: ignore[arg-type]


def test_a_wrong_init_method_and_an_unknown_option() -> None:
    """They are refused by the strategy itself, with what is nearest."""
    assert "needs a port (got none); write tcp://10.0.0.1:29500" in refusal(
        InitMethodError, init_method="tcp://10.0.0.1"
    )
    assert "did you mean find_unused_parameters?" in refusal(OptionError, find_unused_parameter=True)


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False, **options)


def test_devices_that_disagree_with_the_arguments() -> None:
    """The Trainer refuses processes that are not as many as its devices and nodes, and says who counts otherwise."""
    with pytest.raises(WorldError) as refused:
        trainer(strategy=DDPExtStrategy(TCP, rank=0, world_size=4), devices=2)
    message = str(refused.value)
    assert message.startswith(
        "devices * num_nodes must equal world_size (got devices=2 * num_nodes=1 and world_size=4, from arguments); "
    )


def test_devices_that_disagree_with_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for processes that are started with RANK, WORLD_SIZE and LOCAL_RANK."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=r"devices=3 \* num_nodes=1 and world_size=2, from RANK"):
        trainer(strategy=DDPExtStrategy(TCP), devices=3)
