"""Logged trajectories as token rows to imitate: rendered once, exactly as the runtime would."""

from __future__ import annotations

from nano_coder.runtime import ChatTemplate, first_messages, observation_messages, serving_profile
from nano_rl.sample import TrainSample
from nano_shared.conversation import Conversation
from nano_shared.profile import InterfaceProfile
from nano_shared.types import Completion, Trajectory, TurnTokens


def imitation_sample(
    trajectory: Trajectory, profile: InterfaceProfile, template: ChatTemplate, eos_id: int
) -> TrainSample:
    """A row to imitate: the mask is 1 on the completions and the end-of-turn tokens that close them.

    The context is rendered by the very template that serves, turn by turn, so training sees what the
    runtime will show. For text-only runs: their completions are encoded here for the first time.
    """
    task = trajectory.task
    conversation = Conversation(first_messages(serving_profile(profile, task), task, sorted(task.files)))
    mask: list[int] = []
    for turn in trajectory.turns:
        context = template.delta(conversation)
        written = (*template.encoder.text(turn.completion.text), eos_id)
        tokens = TurnTokens(context_ids=context, sampled_ids=written, logprobs=(0.0,) * len(written))
        conversation.record(
            Completion(
                text=turn.completion.text,
                finish=turn.completion.finish,
                tokens=tokens,
                sampling=turn.completion.sampling,
                policy_id=turn.completion.policy_id,
            )
        )
        mask += [0] * len(context) + [1] * len(written)
        for message in observation_messages(turn):
            conversation.append(message)
    length = len(mask)
    return TrainSample(
        run_id=trajectory.id,
        ids=tuple(conversation.tokens),
        mask=tuple(mask),
        logprobs=(0.0,) * length,
        versions=(0,) * length,
        advantage=1.0,
        temperature=1.0,
    )
