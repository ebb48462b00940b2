"""A run's weights for others: one folder that transformers and vLLM load, and uploads to a hub beside training."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from peft import PeftConfig, PeftModel, load_peft_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from memsafe_rl.checkpoint import refusal
from memsafe_rl.checkpoint.store import RUN_STATE, checkpoint_folder, checkpoints, is_checkpoint, step_named
from memsafe_rl.diagnostics.run_figures import read_run
from memsafe_rl.diagnostics.status import STATUS_FILE
from memsafe_rl.errors import ConfigError, first_line, kind_and_line
from memsafe_rl.hub import loading_places_for, places_for
from memsafe_rl.models.loading import auto_class_of
from memsafe_rl.models.vision.processors import processor_for
from memsafe_rl.records import RUN_FILE, read_json
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)


class HubPush(TrainerCallback):  # type: ignore[misc]
    """Uploads checkpoints as `hub_strategy` says; a failed upload is told and never ends the run."""

    def __init__(self, args: Any) -> None:
        self._args, self._api = args, HfApi(token=args.hub_token)
        self._uploads: list[Future[Any]] = []
        self.repo_id: str | None = None

    def open(self, private: bool | None = None) -> str:
        """Makes the repository, and its branch, where they are not there; returns its full name."""
        if self.repo_id is None:
            args = self._args
            name = args.hub_model_id or Path(args.output_dir).name
            private = args.hub_private_repo if private is None else private
            try:
                repo_id = str(self._api.create_repo(name, private=private, exist_ok=True).repo_id)
                if args.hub_revision is not None:
                    self._api.create_branch(repo_id, branch=args.hub_revision, exist_ok=True)
            except Exception as error:  # the client's errors differ between its versions
                raise refusal("hub_model_id", name=name, told=kind_and_line(error)) from error
            self.repo_id = repo_id
        return self.repo_id

    def push(
        self, write: Callable[[Path], Any], message: str, *, wait: bool, place: str | None = None, **more: Any
    ) -> Any:
        """Uploads what is written into an empty folder; returns the commit, or its future where nobody waits for it."""
        os.makedirs(self._args.output_dir, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".push-", dir=self._args.output_dir))
        upload: Future[Any] | None = None
        try:
            write(folder)
            repo_id, more = self.open(), {"revision": self._args.hub_revision, **more}
            upload = self._api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                path_in_repo=place,
                commit_message=message,
                run_as_future=True,
                **more,
            )
            self._uploads.append(upload)
            return upload.result() if wait else upload
        finally:
            if upload is None or wait:
                shutil.rmtree(folder)
            else:
                upload.add_done_callback(lambda _: shutil.rmtree(folder))

    def card(
        self, name: str | None, dataset_name: str | None = None, tags: Sequence[str] | str | None = None
    ) -> ModelCard:
        """Writes a card of the run's model; its name is that of the run's folder if None."""
        algorithm, own = self._args.algorithm, [tags] if isinstance(tags, str) else list(tags or ())
        name = name or Path(self._args.output_dir).name
        return model_card(name, f"Trained with {algorithm}.", algorithm.lower(), *own, datasets=dataset_name)

    def push_model(
        self,
        save: Callable[..., Any],
        message: str,
        *,
        wait: bool,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        model_name: str | None = None,
        **facts: Any,
    ) -> Any:
        """Uploads what ``save`` writes for users, with a card; see `PolicyTrainer.push_to_hub`."""
        self._api = HfApi(token=token) if token else self._api
        card = self.card(model_name or self.open(private).split("/")[-1], **facts)

        def write(folder: Path) -> None:
            save(str(folder), _internal_call=True)
            card.save(folder / "README.md")

        return self.push(write, message, wait=wait, **({"revision": revision} if revision else {}))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Uploads the weights of a checkpoint, and the checkpoint itself where `hub_strategy` asks for it."""
        busy = any(not upload.done() for upload in self._uploads)
        if args.hub_strategy == "end" or (busy and not args.hub_always_push):
            return
        self._tell_failures()
        source = checkpoint_folder(Path(args.output_dir), state.global_step)
        message = f"Training in progress, step {state.global_step}"
        place = {"checkpoint": "last-checkpoint", "all_checkpoints": source.name}.get(args.hub_strategy.value)
        self.push(lambda folder: _link(source, folder, RUN_STATE), message, wait=False)
        if place is not None:
            # in the place of the checkpoint before, of which no file may stay
            whole = {"place": place, "delete_patterns": "*"}
            self.push(lambda folder: _link(source, folder), f"{message}, checkpoint", wait=False, **whole)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Waits for what is under way."""
        self._tell_failures(wait=True)

    def _tell_failures(self, *, wait: bool = False) -> None:
        for upload in [upload for upload in self._uploads if wait or upload.done()]:
            self._uploads.remove(upload)
            if (error := upload.exception()) is not None:
                logger.warning("an upload to %s failed; training continues: %s", self.repo_id, error)


def model_card(name: str, text: str, *tags: str, library_name: str = "transformers", **data: Any) -> ModelCard:
    """Writes a card of a model that was trained here."""
    head = ModelCardData(library_name=library_name, model_name=name, tags=["memsafe_rl", *tags], **data)
    return ModelCard(f"---\n{head.to_yaml()}\n---\n\n# {name}\n\n{text}\n")


def _link(source: Path, folder: Path, left_out: frozenset[str] = frozenset()) -> None:
    """Links a checkpoint's files into a folder, for the checkpoint may be removed while they are uploaded."""
    for path in source.iterdir():
        if path.is_file() and path.name not in left_out:
            target = folder / path.name
            with suppress(OSError):  # file systems without links
                os.link(path, target)
            if not target.exists():
                shutil.copy2(path, target)


_ADAPTER, _CONFIG, _CARD = "adapter_config.json", "config.json", "README.md"
_OF_PEFT = {_ADAPTER, _CARD, "adapter_model.safetensors"}
_EMPTY, _OURS = "[More Information Needed]", "<!-- memsafe_rl writes this card; remove this line to keep changes. -->"


def export(source: str, target: str, dtype: str | None, *, trust_remote_code: bool = False) -> Path:
    """Writes a run's final model, else its latest checkpoint, or a checkpoint; adapters are merged in float32."""
    out, given = Path(target), Path(source)
    places = [given, *reversed(checkpoints(given))] if given.is_dir() else []
    if (read_json(given / STATUS_FILE) or {}).get("state", "finished") != "finished":
        places.sort(key=_written_at, reverse=True)  # the model there may be of the run before it was resumed
    folder = next((place for place in places if (place / _CONFIG).is_file() or _adapter_in(place)), None)
    if folder is None:
        raise refusal("export/weights", folder=str(given), adapter=_ADAPTER, config=_CONFIG)
    refusal.when(out.exists() and (not out.is_dir() or any(out.iterdir())), "export/target", target=target)
    try:
        config, model, base = _loaded(folder, trust_remote_code=trust_remote_code)
        own = {"trust_remote_code": trust_remote_code}
        processor = processor_for(str(folder), None, config, **own) or AutoTokenizer.from_pretrained(folder, **own)
        model.to(config.dtype or torch.float32 if dtype is None else getattr(torch, dtype)).save_pretrained(out)
        processor.save_pretrained(out)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise refusal("export/failed", folder=str(folder), reason=first_line(error).rstrip(".")) from error
    _card(folder, base, out.name).save(out / _CARD)
    return out


def _written_at(place: Path) -> float:
    return max((path.stat().st_mtime for path in (_adapter_in(place) or place).glob("*.safetensors")), default=0.0)


def _adapter_in(folder: Path) -> Path | None:
    """Finds an adapter: in the folder itself, else in one of the adapter's name, as PEFT writes all but "default"."""
    named = (path.parent for path in sorted(folder.glob(f"[!.]*/{_ADAPTER}")))
    alone = (one for one in named if {path.name for path in one.iterdir()} <= _OF_PEFT)  # not a model saved there
    return folder if (folder / _ADAPTER).is_file() else next(alone, None)


def _loaded(folder: Path, *, trust_remote_code: bool) -> tuple[Any, Any, str]:
    """Returns the network's config, the network, and the name of what it was trained from; unknown where empty."""
    adapter, own = _adapter_in(folder), dict[str, Any](trust_remote_code=trust_remote_code)
    if adapter is None:
        config = AutoConfig.from_pretrained(folder, **own)
        return config, auto_class_of(config).from_pretrained(folder, dtype="auto", **own), ""
    peft_config, settings = PeftConfig.from_pretrained(adapter), _run_of(folder)[1].get("config", {})
    base, own = str(peft_config.base_model_name_or_path), {**own, "revision": peft_config.revision or "main"}
    named = re.search("'subfolder': '[^']", settings.get("model_init_kwargs", ""))
    refusal.when(named is not None, "export/subfolder", folder=str(folder), base=base)
    try:
        config = AutoConfig.from_pretrained(base, **places_for(base, **own))
        model = auto_class_of(config).from_pretrained(base, **loading_places_for(base, dtype=torch.float32, **own))
    except OSError as error:
        raise refusal("export/base", folder=str(folder), base=base) from error
    weights, layers = load_peft_weights(str(adapter), device="cpu"), _vocabulary_layers(model)
    names = [f"base_model.model.{name}" for name, module in model.named_modules() if module in layers]
    own_rows = next((weights[key] for key in map("".join, product(names, _ROWS)) if key in weights), None)
    if own_rows is not None and len(own_rows) != len(layers[0].weight):
        model.resize_token_embeddings(len(own_rows))  # trained with a larger vocabulary than the base's
    tuned = PeftModel.from_pretrained(model, str(adapter))
    _untie(model, folder)
    return config, tuned.merge_and_unload(), base


_ROWS = (".weight", ".base_layer.weight", ".token_adapter.base_layer.weight")  # where PEFT keeps a whole embedding


def _vocabulary_layers(model: Any) -> list[Any]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def _untie(model: Any, folder: Path) -> None:
    """Gives the head weights of its own, where an adapter of it or of the embedding would be merged into both."""
    layers = _vocabulary_layers(model)
    embedding, head = own = [one.get_base_layer() if isinstance(one, BaseTunerLayer) else one for one in layers]
    if own != layers and head is not None and head.weight is embedding.weight:
        refusal.when(model.config.is_encoder_decoder, "export/tied", folder=str(folder))  # which tie them as they load
        head.weight, model.config.tie_word_embeddings = nn.Parameter(head.weight.detach().clone()), False


def _run_of(folder: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """Finds the folder of the run that wrote a model or a checkpoint, and what it says of the run."""
    run_folder = next((place for place in (folder, folder.parent) if (place / RUN_FILE).is_file()), None)
    return run_folder, {} if run_folder is None else read_json(run_folder / RUN_FILE) or {}


def fill_card(folder: Path, run_folder: Path) -> None:
    """Writes a model card in the place of the empty form that PEFT leaves beside an adapter, or of an earlier one."""
    card = folder / _CARD
    if card.is_file() and any(mark in card.read_text(encoding="utf-8") for mark in (_EMPTY, _OURS)):
        _card(run_folder, "", folder.resolve().name, library="peft").save(card)


def _card(folder: Path, base: str, name: str, library: str = "transformers") -> ModelCard:
    """Writes a model card from what the run has recorded."""
    run_folder, run = _run_of(folder)
    facts = {"data": run.get("data", ""), **run.get("facts", {})}
    base = base or facts.get("model", "")
    if run_folder is not None:
        is_part = folder != run_folder and is_checkpoint(folder)
        read, last = read_run(run_folder), step_named(folder) if is_part else math.inf
        read = replace(read, steps=[step for step in read.steps if step.get("step", 0) <= last])
        names = dict.fromkeys(key.split("/")[1] for step in read.steps for key in step if key.startswith("rewards/"))
        found = read.figures
        facts |= {"rewards": ", ".join(names), "optimizer steps": str(found.steps)}
        if None not in (found.first_reward, found.last_reward, found.peak_bytes, found.budget_bytes):
            facts["reward"] = f"{found.first_reward:.3f} in the first rollout, {found.last_reward:.3f} in the last"
            facts["peak memory"] = f"{format_bytes(found.peak_bytes or 0)} of {format_bytes(found.budget_bytes or 0)}"
    facts |= {f"version of {package}": version for package, version in run.get("versions", {}).items()}
    rows = "".join(f"\n| {fact} | {value} |" for fact, value in facts.items() if value not in ("", "None"))
    text = f"Trained with memsafe_rl.\n\n| | |\n|---|---|{rows}\n\n{_OURS}"
    return model_card(name, text, library_name=library, base_model=base or None)
