"""Forecasts of bytes, held and reserved, and of seconds, beside the runs."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from peft import LoraConfig

from benchmarks import forecast_error
from benchmarks.gpu_parts.sizes import (
    DEVICE,
    Case,
    Record,
    Rows,
    Size,
    Timed,
    counted,
    failures,
    highest,
    prompts,
    random_network,
    real_config,
    settings,
)
from benchmarks.random_runs import draw_run
from benchmarks.small import filled_tokenizer
from memsafe_rl import GRPOConfig, GRPOTrainer, forecast_memory
from memsafe_rl.preflight.speed import measured_speed
from memsafe_rl.types import Phase

NEAR_PEAK, NEAR_DRIVER, NEAR_RESERVED, NEAR_SECONDS = 0.05, 0.08, 0.03, 0.30
"""Largest relative errors: against the allocator's live and reserved bytes, the driver's, and the clock."""
_STEPS = 3


def forecast(size: Size) -> Rows:
    """Forecasts runs, makes them with random weights and completions of full length, and compares."""
    for case in size.cases:
        yield str(case), foreseen(case, size)


def foreseen(case: Case, size: Size) -> Record:
    """Forecasts one run, and makes it."""
    config = real_config(case.model, size)
    with tempfile.TemporaryDirectory() as folder, counted() as meter:
        config.save_pretrained(folder)
        args = GRPOConfig(
            **settings(folder, bf16=size.dtype.itemsize == 2),
            per_device_train_batch_size=4 * case.group,
            num_generations=case.group,
            max_completion_length=case.new_tokens,
            generation_kwargs={"min_new_tokens": case.new_tokens},
            max_steps=_STEPS,
        )
        given: Record = {
            "train_dataset": prompts(16, size.prompt_tokens),
            "processing_class": filled_tokenizer(config.vocab_size),
            "peft_config": None if case.lora is None else LoraConfig(r=case.lora, target_modules="all-linear"),
        }
        speed = measured_speed(DEVICE, size.dtype)
        asked = replace(args, model_init_kwargs={"dtype": size.dtype})  # as the network below is made
        told = forecast_memory(folder, asked, device_bytes=meter.total_bytes(), device="cuda", speed=speed, **given)
        driver_before = meter.unheld_bytes()
        reward = Timed()
        trainer = GRPOTrainer(random_network(config, size), reward, args=args, **given)
        trainer.train()
        held, reserved = highest(trainer, "memory/peak_bytes"), highest(trainer, "memory/reserved_bytes")
        driver = driver_before - meter.unheld_bytes()
        failed = failures(trainer)
        del trainer
    bytes_told = max(peak for phase, peak in told.phase_bytes.items() if phase is not Phase.LOAD)
    reserved_told = max(peak for phase, peak in told.reserved_bytes.items() if phase is not Phase.LOAD)
    assert told.step_seconds is not None
    errors = {
        "error": bytes_told / held - 1,
        "driver_error": reserved_told / driver - 1,
        "reserved_error": reserved_told / reserved - 1,
        "seconds_error": told.step_seconds.step / reward.step_seconds() - 1,
    }
    limits = (NEAR_PEAK, NEAR_DRIVER, NEAR_RESERVED, NEAR_SECONDS)
    judged = dict(zip(errors, limits, strict=True)) if not size.shrunk else {"error": NEAR_PEAK}
    return {
        "forecast_bytes": bytes_told,
        "held_bytes": held,
        "forecast_reserved_bytes": reserved_told,
        "reserved_bytes": reserved,
        "driver_bytes": driver,
        **errors,
        "forecast_seconds": told.step_seconds.step,
        "seconds": reward.step_seconds(),
        "failures": failed,
        "passed": all(abs(errors[name]) <= limit for name, limit in judged.items()),
    }


def random_runs(size: Size) -> Rows:
    """Forecasts runs drawn at random, and makes them, as `benchmarks.forecast_error --random` does."""
    for index in range(size.random_runs):
        yield f"seed 0, run {index}", _drawn(index)


def _drawn(index: int) -> Record:
    run = draw_run(0, index)
    with tempfile.TemporaryDirectory() as folder, counted():
        forecast_error.save_network(run.network_config(), folder)
        found = forecast_error.beside(run, partial(run.trainer, Path(folder), use_cpu=False), on_device=True)
    errors = dict(forecast_error.errors_of(found))
    return {
        "run": str(run),
        "held_bytes": found["held_peak_bytes"],
        "forecast_bytes": found["forecast_peak_bytes"],
        **{name: errors[name] for name in ("peak", "reserved") if name in errors},
        "worst_phase": max((size for name, size in errors.items() if name not in ("peak", "reserved")), key=abs),
        "passed": not forecast_error.Limits().passed([errors]),
    }
