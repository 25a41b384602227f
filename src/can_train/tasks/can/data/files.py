"""Which files a data set is made of, for those who ask whether they are there and whether they have changed."""

from pathlib import Path

from can_train.tasks.can.data.layout import find_logs
from can_train.tasks.can.settings import CanDatasetSettings
from can_train.tasks.can.synthetic.writing import is_synthetic


def data_files(dataset: CanDatasetSettings, data_root: Path) -> list[Path]:
    """Lists a data set's logs; none where they are simulated.

    Raises:
        MissingDataError: They are not there.
        ConfigError: No data set has this name.
    """
    return [] if is_synthetic(dataset) else [log.path for log in find_logs(dataset, data_root)]
