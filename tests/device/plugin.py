"""`pytest -p tests.device.plugin -n 0`: runs tests in a process that has the pretend CUDA device."""

from tests.device import pretend

pretend.load()
