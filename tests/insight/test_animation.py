import numpy as np
import pytest
import torch
from PIL import Image

from clearhead.insight.animation import LAST, save_animation


def test_one_frame_for_each_step_and_the_last_stays(tmp_path):
    path = save_animation([0, 10, 20], torch.eye(4) * torch.tensor([0.1, 0.5, 1.0])[:, None, None], tmp_path / "a.gif")
    with Image.open(path) as animation:
        assert animation.n_frames == 3
        assert animation.info["loop"] == 0
        frames, pauses = [], []
        for i in range(3):
            animation.seek(i)
            frames.append(np.asarray(animation.convert("RGB")))
            pauses.append(animation.info["duration"])
    assert not np.array_equal(frames[0], frames[1])
    assert pauses[2] == LAST * pauses[0]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"saved as \.gif, got 'a\.png'; try a\.gif"):
        save_animation([0], torch.zeros(1, 2, 2), tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"one matrix for each step, got \(1, 2, 2\) for 2 steps"):
        save_animation([0, 1], torch.zeros(1, 2, 2), tmp_path / "a.gif")
