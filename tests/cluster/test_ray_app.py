"""The application that `build` makes, with Ray's own checks of it; nothing starts."""

from __future__ import annotations

import subprocess

import needs
import pytest

BUILD = """
import warnings

from kvelastic.integration.ray.app import build

warnings.simplefilter("error")
model = {"name": "m", "command": ["x", "{port}"], "autoscale": {"most_replicas": 2}}
application = build({"models": [model], "report_every": 0.25})
(engine,) = application._bound_deployment.init_args[1].values()
print(engine._bound_deployment._deployment_config.autoscaling_config.metrics_interval_s)
"""


@pytest.mark.slow
@needs.ray
def test_autoscaled_application_builds_without_warnings() -> None:
    command = [str(needs.RAY_PYTHON), "-c", BUILD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "0.25\n"), done.stderr
