import numpy as np
import pytest
import torch
from PIL import Image

from clearhead.insight.head_plots import LAST_FRAME, save_animation


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
    assert pauses[2] == LAST_FRAME * pauses[0]


def test_nothing_moves_but_the_weights_and_the_step(tmp_path):
    alike = torch.full((3, 4, 4), 0.25)
    with Image.open(save_animation([0, 500, 12_000], alike, tmp_path / "a.gif")) as animation:
        frames = []
        for i in range(3):
            animation.seek(i)
            frames.append(np.asarray(animation.convert("RGB")).astype(int))
    moved = [np.nonzero(np.abs(frame - frames[-1]).max((1, 2)) > 40)[0] for frame in frames[:-1]]
    title = 80  # rows: the title and the step stand above the map
    assert all(len(rows) and rows.max() < title for rows in moved)


def test_invalid_animations_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"saved as \.gif, got 'a\.png'; try a\.gif"):
        save_animation([0], torch.zeros(1, 2, 2), tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"one matrix for each step, got \(1, 2, 2\) for 2 steps"):
        save_animation([0, 1], torch.zeros(1, 2, 2), tmp_path / "a.gif")
