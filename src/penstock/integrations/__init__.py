"""Penstock in training frameworks. Each module needs its framework, and nothing else imports it.

accelerate             `adapt`: an `Accelerator` that knows the ranks of a pipe
transformers           `PipeTrainer`, and `PipeTrainerMixin` for TRL's `SFTTrainer`;
                       `PipelineCallback`: logs and draws their steps
lightning              `PenstockStrategy` for the Trainer, and `PenstockFabricStrategy`
                       (`pytorch_lightning`: the same for the package of that name)
lightning_callback     `PipelineMonitor`: logs and draws the steps of a Trainer of Lightning
torchtitan             `make_pipelining_fn`: a pipe behind torchtitan's `pipelining_fn`
"""
