"""The warnings of Lightning that tests ignore: of small loaders, of the machine, and of the libraries it comes with."""

import pytest

QUIET_LIGHTNING = pytest.mark.filterwarnings(
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    r"ignore:.* does not have many workers",
    r"ignore:The `srun` command is available",
    r"ignore:The number of training batches",
)
