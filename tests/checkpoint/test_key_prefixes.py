"""Names with the prefixes of wrappers find the model's, and plain state dicts are known as such."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_ddp_ext.checkpoint.key_prefixes import canonical, names_in_model, renamed

PARTS = st.sampled_from(["module.", "_orig_mod.", "net.", "a.", "module", "b"])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map("".join)


@given(st.lists(NAMES, unique=True, max_size=8), st.lists(NAMES, unique=True, max_size=8))
def test_no_name_is_taken_twice_or_from_the_model(in_file: list[str], in_model: list[str]) -> None:
    """Only names that the model lacks are mapped, to names that the file lacks, each the same but for prefixes."""
    found = names_in_model(in_file, in_model)
    left_over, missing = set(in_file) - set(in_model), set(in_model) - set(in_file)
    assert set(found) <= left_over
    assert set(found.values()) <= missing
    assert len(set(found.values())) == len(found)
    assert all(canonical(name) == canonical(target) for name, target in found.items())
    assert len(renamed(dict.fromkeys(in_file), found)) == len(in_file)
    for name in left_over - set(found):
        candidates = [other for other in missing if canonical(other) == canonical(name)]
        rivals = [other for other in left_over if canonical(other) == canonical(name)]
        assert len(candidates) != 1 or len(rivals) > 1


class Versioned(nn.Linear):
    """A layer of version 2, which has to change what version 1 has saved."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


def test_the_versions_of_modules_survive_a_change_of_names() -> None:
    """A layer that converts the state of an earlier version gets its own version as that of the file."""
    model, other = nn.Sequential(Versioned(2, 2)), nn.Sequential(Versioned(2, 2))
    saved = nn.Sequential(OrderedDict(module=model)).state_dict()
    other.load_state_dict(renamed(saved, names_in_model(saved, model.state_dict())))
    assert torch.equal(other[0].weight, model[0].weight)
