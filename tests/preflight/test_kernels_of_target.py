"""Forecasts attend by the kernels of the device they are for, and count what attention holds there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memsafe_rl import FixedPolicy, RolloutPlan, UpdatePlan, forecast_memory
from memsafe_rl.accounting import standing_for
from memsafe_rl.memory.simulated.workspaces import WORKSPACES
from memsafe_rl.types import Phase
from tests.models.language.cuda_kernels import cuda_kernels
from tests.preflight.beside import ROOM, config_for, prompts, run
from tests.tiny import tiny_model, tiny_tokenizer


class Attention(TorchDispatchMode):
    """Notes which of CUDA's kernels attend."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::_scaled_dot_product_")
        if name in ("flash_attention_backward", "efficient_attention_backward"):
            self.ran.add(name.replace("_attention_", " "))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("key_heads", "expanded_bytes"), [(4, 0), (2, 2 * (3 * 4 * 50 * 64 * 2)), (1, 2 * (3 * 4 * 50 * 64 * 2))]
)
def test_flash_makes_gradients_of_shared_keys_and_values_for_every_head(key_heads: int, expanded_bytes: int) -> None:
    queries, keys = (torch.empty(3, heads, 50, 64, dtype=torch.bfloat16, device="meta") for heads in (4, key_heads))
    sums_bytes = 3 * 4 * 128 * (64 + 1) * 4  # of queries in whole blocks of 128, in float32, and one number for each
    workspace = WORKSPACES["aten::_scaled_dot_product_flash_attention_backward"]
    assert workspace((queries, queries, keys, keys), None) == sums_bytes + expanded_bytes


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_a_forecast_for_cuda_attends_as_a_run_on_it(tmp_path: Path, bf16: bool) -> None:
    tiny_model("qwen3", vocab_size=2000, layers=2, hidden=128, positions=512).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    packed = FixedPolicy(RolloutPlan(rows_in_flight=16), UpdatePlan(micro_batch_tokens=8192, pack_prompts=True))
    settings: dict[str, Any] = {"max_completion_length": 60, "bf16": bf16, "max_steps": 1, "memory_forecast": False}
    rows = prompts(length=100)
    with Attention() as attention:
        forecast = forecast_memory(
            str(tmp_path),
            config_for(tmp_path, **settings),
            device_bytes=ROOM,
            device="cuda",
            train_dataset=rows,
            processing_class=tiny_tokenizer(),
            memory_policy=packed,
        )
    with standing_for("cuda"), cuda_kernels() as ran:
        # some processors hold products of halves in float32, which CUDA's kernels do not
        _, held = run(tmp_path, given={"train_dataset": rows, "memory_policy": packed}, exact=False, **settings)
    assert (
        {one for one in ran if "backward" in one} == attention.ran == {f"{'flash' if bf16 else 'efficient'} backward"}
    )
    assert forecast.phase_bytes[Phase.UPDATE] == pytest.approx(held[Phase.UPDATE], rel=0.01)
