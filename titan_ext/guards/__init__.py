"""What keeps a run from harm: each stops it with one clear error, or in good order.

``agreement`` and ``late_parameters`` before the first step, ``finite`` before weights are spoilt,
``resume`` and ``hf_export`` before a checkpoint is loaded, ``checkpoints`` around loading and
saving, ``stop`` when the machine is taken away.
"""
