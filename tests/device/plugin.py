"""`pytest -p tests.device.plugin -n 0`: runs tests in a process that has the pretend CUDA device."""

from tests.device import pretend

pretend.load()

from tests.models.language.cuda_kernels import give_to_cuda  # noqa: E402 - the device has to be there before torch is

KERNELS = give_to_cuda()
