"""The lab's figures: each draws what an experiment measures. `gallery` has them by the name of their claim."""
