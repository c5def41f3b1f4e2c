"""Each private name of Lightning, torch or another library is used in one module, where
a change of it is noticed.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_ddp_ext
from lightning_ddp_ext.integration.private.replaced_methods import ReplacedMethods

ROOT = Path(lightning_ddp_ext.__file__).parent
# By the module's name in the package, such as "data.samplers".
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")
}
# These modules report a name that Lightning lacks.
REPORTING = {
    "integration.private.compat",
    "integration.private.lightning_tree",
    "integration.private.replaced_methods",
}
# All other private names, by module, each with its purpose.
ALLOWED = {
    "batchnorm.functions": {"_functions": "torch's kernels for statistics of several ranks"},
    "batchnorm.layer": {"_BatchNorm": "the base class of torch's layers"},
    "checkpoint.save": {"_parent": "fsspec's parent of a path"},
    "integration.data.evaluation": {
        "_defaults": "torchmetrics' neutral states",
        "_reductions": "which of torchmetrics' states are lists",
    },
    "integration.private.ddp_times": {
        "_get_ddp_logging_data": "the times of a step; without them, SlowRanks measures nothing",
        "_set_ddp_runtime_logging_sample_rate": "has DDP measure a step",
    },
    "nested": {"_pytree": "the values in nested dicts, lists and tuples"},
    "rendezvous.process_group": {
        "_abort_process_group": "abort without waiting; destroys the group if missing",
        "_set_pg_timeout": "the timeout of an existing group, before torch 2.15",
    },
    "supervision.flight_recorder": {
        "_C": "the Flight Recorder, which is optional",
        "_distributed_c10d": "the Flight Recorder, which is optional",
        "_world": "the groups' names in the Flight Recorder",
    },
}
# Attributes of our strategy that others of our modules use.
COLLABORATORS = {"_checkpoints", "_data", "_rendezvous"}
DOCUMENTED = {"_current_frames", "_exit", "_getframe"}  # functions of os and sys
# Functions that take the name of an attribute as a string.
BY_TEXT = {
    "attrgetter",
    "delattr",
    "getattr",
    "hasattr",
    "private",
    "refuse_missing",
    "replace",
    "setattr",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def names_used_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node imports, or uses of other objects than ``self``, ``cls``
    and ``super()``, also as texts.
    """
    if isinstance(node, ast.Attribute) and not is_own(node.value):
        yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (node.module or "").split(".")
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_TEXT:
        texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
        yield from (text for text in texts if isinstance(text, str))


def is_own(owner: ast.expr) -> bool:
    return ast.unparse(owner) in ("self", "cls", "super()")


def defined_in(tree: ast.AST) -> set[str]:
    """Return the names of a module's functions and classes, and of attributes that are
    set on ``self``.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_own(node.value)
        ):
            found.add(node.attr)
    return found


def names_of_others(module: str) -> set[str]:
    """Return the private names that a module uses and does not define."""
    tree = tree_of(module)
    used = {name for node in ast.walk(tree) for name in names_used_by(node)}
    others = used - defined_in(tree) - COLLABORATORS - DOCUMENTED
    return {name for name in others if is_private(name) and not name.startswith("_ddpx_")}


def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def test_private_names_of_libraries_are_each_used_in_one_place() -> None:
    """Modules that report a missing name may use any; the names in all other modules
    are listed above.
    """
    used = {module: names_of_others(module) for module in FILES}
    assert used["integration.private.compat"]
    elsewhere = {module: used[module] for module in FILES.keys() - REPORTING if used[module]}
    assert elsewhere == {module: set(purposes) for module, purposes in ALLOWED.items()}
    names = [name for purposes in ALLOWED.values() for name in purposes]
    assert len(names) == len(set(names))


def test_compat_reports_each_name_that_lightning_lacks() -> None:
    """Private attributes are read by its function ``private``, never directly."""
    read = [
        node
        for node in ast.walk(tree_of("integration.private.compat"))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]
    assert [node.attr for node in read if is_private(node.attr) and not is_own(node.value)] == []


class Owner:
    """An object of Lightning's without any private name."""


@pytest.mark.lowest
def test_a_private_name_that_lightning_removed_is_named() -> None:
    """The error names the class, the name, the version and the remedy, and nothing is
    replaced.
    """
    owner = Owner()
    message = r"needs .*Owner\.forget, which \S+ \d\S* does not .*; install"
    with pytest.raises(ImportError, match=message):
        ReplacedMethods().replace(owner, "forget", lambda: None)
    assert not hasattr(owner, "forget")


def test_overridden_private_methods_are_checked_when_lightning_is_imported() -> None:
    """Without a check, Lightning would stop calling a method of ours that it renamed,
    without an error.
    """
    source = FILES["integration.private.lightning_tree"].read_text()
    checked = set(re.findall(r'"(_\w+)"', source))
    overridden: set[str] = set()
    for module in [name for name in FILES if name.startswith("integration.")]:
        imported = importlib.import_module(f"lightning_ddp_ext.{module}")
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef):
                overridden |= methods_of_lightning(getattr(imported, node.name), node)
    assert overridden == checked


def methods_of_lightning(cls: type, body: ast.ClassDef) -> set[str]:
    """Return the private methods of Lightning that a class of ours overrides or calls."""
    bases = [
        base
        for base in cls.__mro__
        if base.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    ]
    defined = {node.name for node in ast.walk(body) if isinstance(node, ast.FunctionDef)}
    read = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and is_own(node.value)
    }
    return {
        name
        for name in defined | read
        if is_private(name) and any(name in vars(base) for base in bases)
    }
