"""Train tiny_recall from nothing: minutes on one CPU core, the same weights for the same seed.

    python boot.py headway.engines.models.tiny_recall.train [--out DIR] [--steps N]

The lessons grow with the model: first plain walks, without `<then>`, where the current token says
whose successor is wanted; then the task, where the token before says it; each with prompts that get
longer as soon as the answers are right.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headway.engines.models.plain_tokenizer import write_plain_tokenizer
from headway.engines.models.tiny_recall import PATH
from headway.engines.models.tiny_recall.task import (
    BOS,
    CONTEXT_LENGTH,
    EOS,
    FILLER,
    MIN_PROMPT_TOKENS,
    PAD,
    VOCAB_SIZE,
    expected_output,
    recall_prompt,
)

SEED = 0
NUM_STEPS = 1300
LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
TOKENS_PER_BATCH = 3000
SHORTEST, LONGEST = 20, 480
MASTERED = 0.9


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is practised now: plain walks or the task, and prompts of up to how many tokens."""

    plain: bool = True
    longest: float = 36.0

    def next(self) -> Lesson:
        """Return longer prompts; or the task, once plain walks over 100 tokens are easy."""
        longest = min(self.longest * 1.15 + 1, LONGEST)
        if self.plain and longest > 100:
            return Lesson(plain=False)
        return Lesson(self.plain, longest)


def new_model() -> LlamaForCausalLM:
    """Return the untrained model."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # What all tokens share lets a head look at "the place before" whatever stands there;
        # without it, that takes far more steps to learn.
        model.model.embed_tokens.weight[:, 0] = 0.5
    return model


def make_batch(rng: random.Random, lesson: Lesson) -> tuple[torch.Tensor, int]:
    """Return prompts with their answers [batch, length], and how long the answers are."""
    shortest = MIN_PROMPT_TOKENS if lesson.longest == LONGEST else SHORTEST
    num_tokens = rng.randint(shortest, int(lesson.longest))
    # At most about once around the cycle, since a second round could be copied from the first;
    # only a model that knows better may see those too.
    num_output = num_tokens // (4 if lesson.plain else 2)
    if lesson.longest == LONGEST:
        num_output = max(num_output, 32)
    num_output = min(num_output, CONTEXT_LENGTH - num_tokens)
    rows = []
    for _ in range(max(8, TOKENS_PER_BATCH // (num_tokens + num_output))):
        prompt, output = recall_prompt(rng, num_tokens, num_output)
        if lesson.plain:
            walk = expected_output(prompt, 2 * num_output)[::2]
            rows.append([*prompt[:-1], *walk])
        else:
            rows.append(prompt + output)
    return torch.tensor(rows), num_output


def train(num_steps: int) -> LlamaForCausalLM:
    """Return a model trained for `num_steps`, the last part of them with a falling rate."""
    torch.manual_seed(SEED)
    # More threads than one sum in another order, and the model is too small to gain by them.
    torch.set_num_threads(1)
    rng = random.Random(SEED)
    model, lesson = new_model(), Lesson()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    recent: list[float] = []
    started = time.monotonic()
    for step in range(num_steps):
        rate = min(1.0, (step + 1) / WARMUP_STEPS, 4 * (1 - step / num_steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        batch, num_output = make_batch(rng, lesson)
        logits = model(input_ids=batch[:, :-1], logits_to_keep=num_output).logits
        answers = batch[:, -num_output:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = [*recent[-19:], (logits.argmax(-1) == answers).float().mean().item()]
        accuracy = sum(recent) / len(recent)
        if len(recent) == 20 and accuracy > MASTERED:
            lesson = lesson.next()
        if step % 50 == 49:
            sys.stderr.write(
                f"step {step + 1}: {lesson}, accuracy {accuracy:.3f}, loss {loss.item():.3f}, "
                f"{time.monotonic() - started:.0f} s\n"
            )
    return model


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights, configuration and tokenizer.

    The weights are rounded to bfloat16, so that an engine in any precision holds the same ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    write_plain_tokenizer(
        folder, VOCAB_SIZE, eos_id=EOS, unknown_id=FILLER.start, special_ids=(EOS, PAD)
    )


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(prog="headway.engines.models.tiny_recall.train")
    parser.add_argument("--out", type=Path, default=PATH, help="where the model is written")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of training")
    arguments = parser.parse_args()
    save(train(arguments.steps), arguments.out)


if __name__ == "__main__":
    main()
