"""One set of weights for all roles: what is switched, what stays, and what it saves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.geometry import weight_bytes
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.rollout.multi_turn.roles import ModelKey, ModelRoles, key_of
from memsafe_rl.types import SequenceKey
from tests.rollout.multi_turn.helpers import sampler
from tests.tiny import tiny_model

PROMPT = torch.arange(20, 40)


def with_lora(model: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
    return get_peft_model(model or tiny_model(), config)


def hub_of(model: Any) -> ModelRoles:
    return ModelRoles(CausalLMAdapter(model, pad_token_id=0))


def logits(adapter: Any) -> torch.Tensor:
    with torch.no_grad():
        return adapter.prefill([PROMPT])[0].clone()


def test_roles_differ_by_what_is_switched_on() -> None:
    base = tiny_model()
    plain = logits(CausalLMAdapter(copy.deepcopy(base), pad_token_id=0))
    model = with_lora(base)
    model.add_adapter("customer", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    hub = hub_of(model)
    flags = {name: weight.requires_grad for name, weight in model.named_parameters()}
    seen = {}
    for role in ("agent", "base", "reference", "customer", "default"):
        with hub.acting(role) as adapter:
            seen[role] = logits(adapter)
        assert {name: weight.requires_grad for name, weight in model.named_parameters()} == flags
        assert model.active_adapter == "default"
    assert torch.equal(seen["base"], plain)
    assert torch.equal(seen["reference"], plain)
    assert torch.equal(seen["agent"], seen["default"])
    assert not torch.equal(seen["agent"], plain)
    assert not torch.equal(seen["customer"], plain)
    assert not torch.equal(seen["customer"], seen["agent"])


def test_a_failure_in_a_role_leaves_the_agent_on() -> None:
    hub = hub_of(with_lora())
    with hub.acting("agent") as agent:
        wanted = logits(agent)
    with pytest.raises(RuntimeError), hub.acting("base"):
        raise RuntimeError("in between")
    with hub.acting("agent") as agent:
        assert torch.equal(logits(agent), wanted)


def test_one_role_acts_at_a_time() -> None:
    hub = hub_of(with_lora())
    with (
        hub.acting("base"),
        pytest.raises(ConfigError, match=r"'agent' cannot act while 'base' does"),
        hub.acting("agent"),
    ):
        pass


def test_all_roles_have_the_same_storages() -> None:
    model = with_lora()
    hub = hub_of(model)
    pointers = []
    for role in ("agent", "base", "reference"):
        with hub.acting(role) as adapter:
            pointers.append({weight.untyped_storage().data_ptr() for weight in adapter.model.parameters()})
    assert pointers[0] == pointers[1] == pointers[2]
    held = [*model.parameters(), *model.buffers()]
    once = sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())
    assert weight_bytes(*hub.models) == once


def test_a_second_model_is_loaded_once_for_all_its_roles() -> None:
    hub, loaded = hub_of(with_lora()), []

    def load() -> CausalLMAdapter:
        loaded.append(1)
        return CausalLMAdapter(tiny_model(seed=3), pad_token_id=0)

    key = ModelKey("other", "float32", None, "cpu")
    first, again = hub.register("seller", key, load), hub.register("buyer", key, load)
    assert first is again
    assert loaded == [1]
    assert len(hub.models) == 2
    with hub.acting("seller") as seller, torch.no_grad():
        assert torch.equal(logits(seller), logits(CausalLMAdapter(tiny_model(seed=3), pad_token_id=0)))
    hub.register("half", ModelKey("other", "bfloat16", None, "cpu"), load)
    assert loaded == [1, 1]
    with pytest.raises(ConfigError, match="'seller' is taken"):
        hub.register("seller", key, load)


def test_the_trained_models_own_key_loads_nothing() -> None:
    model = with_lora()
    hub = hub_of(model)
    hub.register("twin", key_of(model), lambda: pytest.fail("loaded twice"))
    with hub.acting("twin") as twin:
        assert twin.model is model


def test_roles_that_cannot_act_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"all its weights are trained. Pass a peft_config"):
        hub_of(tiny_model()).check("base")
    with pytest.raises(ConfigError, match=r"no role 'judge'. Use one of agent, base, reference, default"):
        hub_of(with_lora()).check("judge")
    with pytest.raises(ConfigError, match="bias is 'all'"):
        hub_of(with_lora(bias="all")).check("base")


@pytest.mark.slow
def test_three_roles_need_a_third_of_three_copies() -> None:
    def peak(copies: bool) -> tuple[int, int]:
        with SimulatedMemory() as memory:
            roles = ("agent", "base", "reference")
            made = [hub_of(with_lora(tiny_model(hidden=64, layers=4))) for _ in (roles if copies else roles[:1])]
            hubs = made if copies else made * 3
            weights = memory.live_bytes
            for hub, role in zip(hubs, roles, strict=True):
                with hub.acting(role) as adapter:
                    sampler(adapter)([PROMPT], [[SequenceKey(0, 0, 0, s) for s in range(4)]], [24])
            return memory.peak_bytes, weights

    (one, one_weights), (three, three_weights) = peak(False), peak(True)
    model_bytes = sum(weight.nbytes for weight in with_lora(tiny_model(hidden=64, layers=4)).parameters())
    assert one_weights == pytest.approx(model_bytes, rel=0.02)
    assert three_weights == pytest.approx(3 * model_bytes, rel=0.02)
    assert three - one == pytest.approx(2 * model_bytes, rel=0.1)


def test_no_cache_outlives_a_role() -> None:
    hub = hub_of(with_lora())
    with SimulatedMemory() as memory:
        before = memory.live_bytes
        for role in ("agent", "base"):
            with hub.acting(role) as adapter:
                sampler(adapter)([PROMPT], [[SequenceKey(0, 0, 0, s) for s in range(4)]], [24])
            assert memory.live_bytes == before
