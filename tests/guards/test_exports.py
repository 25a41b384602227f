"""What `from can_train import …` promises is there and explained; test_light_imports.py sees that it costs nothing."""

import ast
import inspect

import pytest

import can_train
from guards.sources import PACKAGE


@pytest.mark.parametrize("name", can_train.__all__)
def test_a_promised_name_is_there_and_explained(name: str) -> None:
    assert inspect.getdoc(getattr(can_train, name))


def test_a_type_checker_sees_just_what_is_promised() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = [alias.name for node in imports if (node.module or "").startswith("can_train") for alias in node.names]
    assert sorted(seen) == sorted(can_train.__all__)


def test_a_name_nobody_promised_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = can_train.no_such_name
