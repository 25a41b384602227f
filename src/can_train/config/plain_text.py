"""A resolved configuration as YAML text and back: plain values only, so that reading it imports and runs nothing."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError


def plain_to_yaml(plain: Mapping[str, Any]) -> str:
    """Writes plain values as YAML, in their order."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(plain)))


def plain_from_yaml(text: str) -> dict[str, Any]:
    """Reads what `plain_to_yaml` wrote.

    Raises:
        ValueError: The text is not a YAML mapping.
    """
    try:
        config = OmegaConf.create(text)
        if not isinstance(config, DictConfig):
            raise ValueError("not a mapping")
        plain = OmegaConf.to_container(config)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(str(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
