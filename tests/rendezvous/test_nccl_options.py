"""NCCL's settings are typed, and in the environment while the process group is open."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist

from lightning_ddp_ext import ConfigurationError, NCCLOptions
from lightning_ddp_ext.rendezvous.nccl_options import variables_of
from lightning_ddp_ext.rendezvous.process_context import leave
from tests.harness.ranks import by_hand_env, launch_ranks, run_ranks
from tests.harness.training import Net, backend, fit

# The variables of ``interface="lo"``, and of options of each type.
ON_LO = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
OF_EACH_TYPE = NCCLOptions(p2p_level="NVL", ib_disable=False, p2p_disable=True, buffsize=2**23)
VARIABLES_OF_EACH_TYPE = {
    "NCCL_P2P_LEVEL": "NVL",
    "NCCL_IB_DISABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_BUFFSIZE": str(2**23),
}
RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
NAMES = ("NCCL_DEBUG", RETHROW, *ON_LO, *VARIABLES_OF_EACH_TYPE)
NOT_EXPORTED = dict.fromkeys(NAMES)  # removes those that a developer's shell exports


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"p2p_level": "NVLINK"},
            r"NCCLOptions.p2p_level must be one of LOC, .*SYS \(got 'NVLINK'\); omit it",
        ),
        (  # no network adapter is at this distance from a GPU
            {"net_gdr_level": "NVL"},
            r"NCCLOptions.net_gdr_level must be one of LOC, PIX, PXB, PHB, SYS \(got 'NVL'\)",
        ),
        ({"socket_nthreads": "4"}, r"NCCLOptions.socket_nthreads must be of type int \(got '4'\)"),
        ({"ib_disable": 1}, r"NCCLOptions.ib_disable must be of type bool \(got 1\)"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], words: str) -> None:
    """The message names the field, the allowed values or the type, and the value."""
    with pytest.raises(ConfigurationError, match=words):
        NCCLOptions(**wrong)


def variables() -> dict[str, str]:
    """Return those of NAMES that are set."""
    return {name: os.environ[name] for name in NAMES if name in os.environ}


class Recorder(L.Callback):
    """Records the variables and the process group at the start of training."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.variables = variables()
        self.group = dist.group.WORLD


def train_over_lo(directory: Path, options: NCCLOptions | None) -> Recorder:
    """Train on two ranks, and return what this rank recorded."""
    recorder = Recorder()
    strategy = {"nccl": options, "interface": "lo"}
    fit("ours", directory, Net(), recorder, strategy=strategy, max_epochs=1)
    return recorder


def change_settings(
    rank: int, world_size: int, directory: Path
) -> tuple[list[Any], dict[str, str]]:
    """Train four times; return the variables in each run and whether its group is not the
    one before, and the variables after the runs.
    """
    runs: list[Any] = []
    group = None
    for options in (NCCLOptions(debug="WARN"), OF_EACH_TYPE, None, None):
        recorder = train_over_lo(directory, options)
        runs.append((recorder.variables, recorder.group is not group))
        group = recorder.group
    leave()
    return runs, variables()


def test_variables_are_set_while_the_group_is_open(tmp_path: Path) -> None:
    """Each Trainer has the variables of its own settings, and a new group only if these
    differ from the last Trainer's; afterwards none is set.
    """
    env = {**by_hand_env(2), **NOT_EXPORTED}
    for runs, variables_afterwards in run_ranks(change_settings, 2, tmp_path, env=env):
        assert runs == [
            ({"NCCL_DEBUG": "WARN"} | ON_LO, True),
            (VARIABLES_OF_EACH_TYPE | ON_LO, True),
            (ON_LO, True),
            (ON_LO, False),
        ]
        assert variables_afterwards == {}


def contradict_and_agree(
    rank: int, world_size: int, directory: Path
) -> tuple[dict[str, str], dict[str, str]]:
    """Train with another value than the exported one, then with the same; return the
    variables in the second run and after it.
    """
    contradiction = (
        "nccl= of the strategy sets NCCL_DEBUG=WARN, but the environment has NCCL_DEBUG=INFO;"
        " remove one of them"
    )
    with pytest.raises(ConfigurationError, match=contradiction):
        train_over_lo(directory, NCCLOptions(debug="WARN"))
    agreeing = train_over_lo(directory, NCCLOptions(debug="INFO"))
    leave()
    return agreeing.variables, variables()


def test_variables_that_the_user_exports_stay(tmp_path: Path) -> None:
    """A strategy that sets another value is refused; after one that sets the same, the
    variables are as the user exported them.
    """
    exported = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo"}
    env = {**by_hand_env(2), **NOT_EXPORTED, **exported}
    for during, afterwards in run_ranks(contradict_and_agree, 2, tmp_path, env=env):
        assert during == exported | {"GLOO_SOCKET_IFNAME": "lo"}
        assert afterwards == exported


def fit_with_options(rank: int, world_size: int, directory: Path) -> list[str | None]:
    """Change NCCL's settings in the last of three fits; return torch's variable during
    each fit, and afterwards.
    """
    # NCCL's settings apply to each backend whose name contains "nccl"; this one is gloo.
    name = backend("nccl_stand_in")
    values = []
    for debug in ("WARN", "WARN", "VERSION"):
        recorder = Recorder()
        strategy = {"nccl": NCCLOptions(debug=debug), "process_group_backend": name}
        fit("ours", directory, Net(), recorder, strategy=strategy, devices=1, fast_dev_run=1)
        values.append(recorder.variables.get(RETHROW))
    leave()
    return [*values, os.environ.get(RETHROW)]


@pytest.mark.parametrize(
    ("exported", "expected"), [(None, ["0", "0", "0", None]), ("1", ["1", "1", "1", "1"])]
)
def test_a_change_of_settings_is_reported_and_errors_of_cuda_are_left_to_python(
    exported: str | None, expected: list[str | None], tmp_path: Path
) -> None:
    """One warning says that NCCL may not read its settings again, and torch's variable for
    errors of CUDA is 0 during a run with NCCL, unless the user exports it.
    """
    # With torch's default, its watchdog ends the process before Python reports an error.
    env = {**by_hand_env(1), **NOT_EXPORTED, RETHROW: exported}
    (outcome,) = launch_ranks(fit_with_options, 1, tmp_path, env=env)
    assert outcome.result == expected, outcome.story()
    warning = "this Trainer sets other variables of NCCL than an earlier one"
    assert outcome.output.count(warning) == 1, outcome.story()


def test_an_interface_is_excluded_for_nccl_only() -> None:
    """``interface="^docker0"`` sets NCCL's variable, and not gloo's, which has no ``^``."""
    assert variables_of(None, "^docker0") == {"NCCL_SOCKET_IFNAME": "^docker0"}
