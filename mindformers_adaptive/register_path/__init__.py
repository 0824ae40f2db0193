"""The folder to give to MindFormers' own ``run_mindformer.py`` as ``--register_path``.

With ``auto_register: adaptive_loss_scaling.LossScaling`` in ``runner_wrapper.scale_sense``, MindFormers loads
``adaptive_loss_scaling.py`` from this folder. It does so when it builds the update cell, whatever its ``type``, before
it looks up the train-step cell.
"""
