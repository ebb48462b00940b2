"""Frozen weights that come from the host beside what is computed."""

from __future__ import annotations

import torch

from memsafe_rl.models.blocks import blocks_of
from memsafe_rl.models.host_weights import HostWeights
from tests.models.test_host_weights import adapted

DEVICE = torch.device("cuda", 0)


def test_bytes_of_weights_on_their_way_are_nobody_elses_until_they_have_arrived() -> None:
    model = adapted()
    ids = torch.arange(15).reshape(3, 5).to(DEVICE)
    with torch.no_grad():
        plain = model.to(DEVICE)(ids).logits.cpu()
        host = HostWeights(blocks_of(model))
        for _ in range(3):
            host.place(0, DEVICE)
            for _ in range(2):
                found = model(ids).logits.cpu()
                assert torch.equal(found, plain)
            host.release()  # the first block is on its way for a pass that does not come
            others = [torch.zeros(64, 64, device=DEVICE) for _ in range(200)]
            torch.cuda.synchronize()
            assert all(not other.cpu().any() for other in others)
