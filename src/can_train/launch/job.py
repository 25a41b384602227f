"""What a job of the scheduler does: trains one run, records how that ended, and has itself put back into the queue when
its time is up.
"""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from can_train.config.cluster import ClusterSettings
from can_train.errors import RunError
from can_train.launch.queue import job_facts, requeue
from can_train.policy.restarts import may_restart
from can_train.training.attempts import Place
from can_train.training.run_folder import RunFolder
from can_train.training.signals import WARNED, StopRequests

Entry = Callable[[RunFolder, StopRequests], None]
"""Trains the run in a folder; what it imports that takes long, it imports when it is called."""
