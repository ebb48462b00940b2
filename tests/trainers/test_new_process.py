"""A run that goes on in a new process ends bit for bit where the unbroken run ends."""

import subprocess
import sys
from pathlib import Path

import torch

RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from peft import LoraConfig
from transformers import TrainerCallback
from tests.trainers.helpers import make_trainer, weights

folder, stop, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"

class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = control.should_training_stop or state.global_step == stop

trainer = make_trainer(
    folder, max_steps=7, num_iterations=3, save_strategy="steps", save_steps=4, callbacks=[StopAt()],
    peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), beta=0.05,
)
trainer.train(resume_from_checkpoint=resume)
torch.save(weights(trainer), folder / "weights.pt")
"""


def run(folder: Path, stop: int, resume: str) -> torch.Tensor:
    folder.mkdir(exist_ok=True)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(stop), resume],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: torch.Tensor = torch.load(folder / "weights.pt")
    return found


def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 7, "fresh")
    broken = run(tmp_path / "broken", 4, "fresh")
    assert not torch.equal(broken, whole)
    assert torch.equal(run(tmp_path / "broken", 7, "resume"), whole)
