"""RULER (Hsieh et al., 2024): its 13 tasks, made or read, scored officially, run through lm-eval (paper 3.1)."""
