"""The strategy, which delegates each of Lightning's hooks to its collaborators.

================  =================================================================
Collaborator      Its question
================  =================================================================
``_rendezvous``   How do the ranks connect?
``_ranks``        Do the ranks still cooperate after a failure? Which work does rank 0
                  do for all?
``_files``        Where is the stop checkpoint, and with which file does a run continue?
``_checkpoints``  What do all ranks do to save or restore?
``_stops``        At which step do all ranks stop after a signal?
``_last_step``    Which rank saves the last finished step after a failure?
``_data``         What does each rank read (``uneven``, ``evaluation``), and where does
                  an epoch continue (``resume``)?
``_metrics``      How are logged values reduced?
``_averaging``    Which gradients does DDP average?
``_replaced``     Which of Lightning's methods are replaced during the run?
================  =================================================================

In a run, Lightning calls ``connect``, ``setup_environment``, ``setup``, the hooks of
training and evaluation, and ``teardown``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from typing_extensions import override

from lightning_ddp_ext.arguments import check_choice, integer, to_timedelta
from lightning_ddp_ext.checkpoint.location import PathOrUrl
from lightning_ddp_ext.rendezvous.init_method import InitMethod
from lightning_ddp_ext.rendezvous.nccl_options import NCCLOptions
from lightning_ddp_ext.supervision.stacks import caller_in_lightning
from lightning_ddp_ext.world import World

from .callbacks.rank_debugger import rank_debugger_of
from .checkpoints.checkpoint_io import RankZeroCheckpointIO
from .checkpoints.collective import Checkpoints
from .checkpoints.run_files import RunFiles
from .cooperation import CooperatingRanks
from .data.loaders import TrainerLoaders
from .data.resume import ResumeData
from .data.training_loaders import UnevenMode
from .ddp import GradientAveraging
from .logged_values import LoggedValues, Reduction
from .options import refuse_accumulating_static_graph, refuse_mistyped, refuse_unknown
from .private.compat import trainer_of
from .private.lightning_tree import ClusterEnvironment, pl, refuse_other_tree
from .private.replaced_methods import ReplacedMethods
from .start.devices import RankDevicesStrategy
from .start.environment import choose_environment, world_of
from .start.joining import HEARTBEAT_TIMEOUT, INIT_TIMEOUT, Rendezvous
from .start.launchers import Collaborators, ProcessesLauncher, ScriptLauncher
from .stopping.last_step import LastStepSaver
from .stopping.stops import StopController, default_deadline
from .strategy_ranks import check_received, enter_broadcast, enter_call, enter_decision
from .sync_batchnorm import RanksLayerSync

T = TypeVar("T")

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

TIMEOUT = timedelta(minutes=30)  # Lightning's default; NCCL's would be 10 minutes


class DDPExtStrategy(RankDevicesStrategy):
    """Lightning's ``ddp`` with a choice of init methods, whose runs end together and resume.

    However a run ends early, every rank exits within a bounded time, the last finished step
    is saved, and ``ckpt_path="last"`` continues with the next batch.

    Args:
        init_method: how the ranks connect: ``"env://"``, ``"tcp://host:29500"``,
            ``"file:///shared/run42"``, or an :class:`~lightning_ddp_ext.Env`,
            :class:`~lightning_ddp_ext.Tcp` or :class:`~lightning_ddp_ext.File`.
            ``None`` uses the variable ``DDPX_INIT_METHOD``, or else the address of
            Lightning's cluster environment; on one node, the kernel chooses a port.
        init_timeout: seconds or ``timedelta`` within which all ranks must connect.
        heartbeat_timeout: seconds or ``timedelta`` of silence after which a rank's host
            or network is considered dead. The exit of a process is detected
            immediately.
        timeout: seconds or ``timedelta`` that a collective may take; ``None`` uses the
            backend's own limit.
        devices_per_rank: the number of the Trainer's devices that each rank gets. The
            module must place its parts on ``self.trainer.strategy.rank_devices`` in
            ``configure_model``; Lightning moves batches to the first of them.
        start_method: how the other ranks start: ``"popen"`` runs the script again; the
            other methods start a function.
        exact_evaluation: whether logged values and metrics of validation and test count
            each sample exactly once, in loaders to which Lightning adds a sampler.
            Samples that stock Lightning repeats have a separate step.
        uneven_inputs: how an epoch ends if the ranks have different numbers of training
            batches. ``"stop_at_shortest"`` ends it after the last step for which every
            rank has a batch. ``None`` raises if a rank would wait for a shorter one.
        resume_data: where training continues in a checkpoint's epoch: ``"exact"``
            continues with the next batch and each rank's random states, or starts the
            epoch again if its order cannot be drawn again; ``"stock"`` does what
            Lightning does.
        stop_checkpoint: where the last finished step is saved if the run ends early: by
            SIGTERM, Ctrl-C or SLURM's signal, or by a rank that fails or dies. A file
            name is placed in a folder of the command and of the number of the fit, where
            ``ckpt_path="last"`` finds it: in the ``dirpath`` of the Trainer's
            ``ModelCheckpoint``, or in ``<default_root_dir>/checkpoints``. A path is used
            as it is. ``None`` saves nothing.
        save_deadline: seconds or ``timedelta`` between a signal or exception and the
            moment when ranks are killed without saving; ``None``: 25 s under torchrun,
            which kills ranks after 30 s, and 10 minutes elsewhere.
        nccl: NCCL settings, see :class:`~lightning_ddp_ext.NCCLOptions`.
        interface: the network interface for NCCL and gloo, such as ``"eth1"``.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; ``None`` chooses the backend
            for the device.
        accelerator: the kind of device; set by the Trainer.
        parallel_devices: the devices of this host; set by the Trainer.
        cluster_environment: a plugin that provides ranks and address; by default, the
            Trainer detects the launcher.
        checkpoint_io: writes and reads checkpoints; by default a
            :class:`~lightning_ddp_ext.RankZeroCheckpointIO`.
        precision_plugin: mixed precision; the Trainer creates it from ``precision=``.
        ddp_comm_state: the state of the comm hook, such as a ``PowerSGDState``.
        ddp_comm_hook: a function that averages gradients, such as torch's
            ``fp16_compress_hook``; on GPUs only.
        ddp_comm_wrapper: wraps the comm hook, such as ``fp16_compress_wrapper``.
        model_averaging_period: the number of steps between averages of the model with
            post-local SGD.
        **ddp_kwargs: arguments of :class:`torch.nn.parallel.DistributedDataParallel`,
            such as ``find_unused_parameters=True``, ``static_graph=True`` or
            ``gradient_as_bucket_view=True``.

    Raises:
        ConfigurationError: an argument does not exist here or in the installed torch; a
            value is not allowed; or arguments, environment variables and the Trainer's
            ``devices`` and ``num_nodes`` contradict each other.

    Example::

        trainer = L.Trainer(strategy=DDPExtStrategy(init_method="file:///shared/run42"), devices=2)
    """

    strategy_name = "ddp_ext"

    def __init__(
        self,
        init_method: str | InitMethod | None = None,
        *,
        init_timeout: float | timedelta = INIT_TIMEOUT,
        heartbeat_timeout: float | timedelta = HEARTBEAT_TIMEOUT,
        timeout: float | timedelta | None = TIMEOUT,
        devices_per_rank: int = 1,
        start_method: StartMethod = "popen",
        exact_evaluation: bool = True,
        uneven_inputs: UnevenMode | None = None,
        resume_data: ResumeData = "exact",
        stop_checkpoint: PathOrUrl | None = "last-preempted.ckpt",
        save_deadline: float | timedelta | None = None,
        nccl: NCCLOptions | None = None,
        interface: str | None = None,
        process_group_backend: str | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: pl.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        check_choice("start_method", start_method, *get_args(StartMethod))
        refuse_unknown(DDPExtStrategy.__init__, ddp_kwargs)
        refuse_mistyped(
            {
                "checkpoint_io": checkpoint_io,
                "cluster_environment": cluster_environment,
                **ddp_kwargs,
            }
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=to_timedelta(timeout, field="timeout"),
            start_method=start_method,
            **ddp_kwargs,
        )
        self.devices_per_rank = integer(
            devices_per_rank,
            "devices_per_rank",
            at_least=1,
            remedy="leave it out to give each rank one device",
        )
        self._rendezvous = Rendezvous(
            init_method,
            init_timeout=init_timeout,
            heartbeat_timeout=heartbeat_timeout,
            nccl=nccl,
            interface=interface,
        )
        deadline = to_timedelta(save_deadline, field="save_deadline") or default_deadline()
        # Each collaborator gets the earlier ones that it uses.
        self._ranks = CooperatingRanks(self, tracks_runs=True)
        self._files = RunFiles(stop_checkpoint, self._ranks)
        self._checkpoints = Checkpoints(self, self._ranks, deadline)
        self._stops = StopController(self, self._files, self._checkpoints.background, deadline)
        self._replaced = ReplacedMethods()
        self._data = TrainerLoaders(
            self,
            self._ranks,
            self._stops,
            self._replaced,
            exact_evaluation=exact_evaluation,
            uneven_inputs=uneven_inputs,
            resume_data=resume_data,
        )
        self._metrics = LoggedValues(self, self._ranks, self._data.evaluation)
        self._last_step = LastStepSaver(
            self,
            self._files,
            self._checkpoints.background,
            self._stops,
            self._data.resume,
        )
        self._averaging = GradientAveraging(self)

    @property
    def world(self) -> World:
        """This process's place among all ranks.

        It is available once the strategy has a Trainer.
        """
        return world_of(self)

    @override
    def set_world_ranks(self) -> None:
        self.cluster_environment = choose_environment(
            self.cluster_environment,
            devices=self.num_processes,
            num_nodes=self.num_nodes,
        )
        super().set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        parts = Collaborators(
            rendezvous=self._rendezvous,
            files=self._files,
            last_step=self._last_step,
            deadline=self._stops.deadline,
        )
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(self, parts)
        else:
            self._launcher = ProcessesLauncher(self, parts, start_method=self._start_method)

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        trainer = trainer_of(self.lightning_module)
        self._rendezvous.join(self, is_debugged=rank_debugger_of(trainer) is not None)
        super().setup_distributed()  # keeps the existing group

    # Checkpoints.

    @property
    @override
    def checkpoint_io(self) -> pl.plugins.CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = RankZeroCheckpointIO()
        elif isinstance(self._checkpoint_io, pl.plugins.AsyncCheckpointIO):
            self._checkpoint_io.checkpoint_io = RankZeroCheckpointIO()  # unless it has one
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: pl.plugins.CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathOrUrl, storage_options: Any = None
    ) -> None:
        self._checkpoints.save(
            checkpoint,
            filepath,
            storage_options,
            add_states=partial(
                self._data.resume.save_to,
                checkpoint,
                f"saving {os.fspath(filepath)}",
            ),
        )

    @override
    def remove_checkpoint(self, filepath: PathOrUrl) -> None:
        self._checkpoints.remove(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: PathOrUrl, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self._checkpoints.load(
            checkpoint_path, weights_only=weights_only, on_restored=self._data.resume.restore
        )

    def _restore_chosen_file(
        self, restore: Callable[..., None], path: PathOrUrl | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Restore the file that rank 0 chose, with Lightning's own method ``restore``."""
        self._checkpoints.restore(restore, self._files.file_to_restore(path), *args, **kwargs)

    # The Trainer's run.

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        if trainer_of(model) is not None:  # a user may connect a model without a run
            self.set_world_ranks()  # not yet set in a spawned rank
            # configure_callbacks runs next and may load the data.
            self._data.attach(model.trainer)

    @override
    def setup_environment(self) -> None:
        trainer = trainer_of(self.lightning_module)
        if trainer is None:
            # Called by the user to create the process group before a run.
            super().setup_environment()
            return
        refuse_other_tree(self.checkpoint_io, *trainer.callbacks)
        super().setup_environment()
        # Now, because later hooks of the run would also wait for the store. On each run,
        # because the ranks may have been given different paths.
        self._files.choose(trainer)
        self._replaced.restore_checkpoint_by(trainer, self._restore_chosen_file)
        self._metrics.start_run()
        self._ranks.start_run()
        self._stops.attach(trainer, self._replaced)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if type(self._layer_sync) is pl.plugins.TorchSyncBatchNorm:
            self._layer_sync = RanksLayerSync()
        super().setup(trainer)
        self._last_step.start()

    @override
    def on_train_start(self) -> None:
        refuse_accumulating_static_graph(self.current_trainer)
        self._data.resume.on_train_start()
        self._stops.weights.on_train_start(trainer_of(self.lightning_module))

    @override
    def on_train_end(self) -> None:
        self._stops.at_end()

    @override
    def on_validation_end(self) -> None:
        self._data.resume.on_validation_end()
        self._stops.weights.after_validation()
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        self._data.evaluation.end()
        self._stops.at_end_of_evaluation()

    on_test_end = on_predict_end = _end_evaluation

    @override
    def teardown(self) -> None:
        try:
            self._checkpoints.background.finish()
            self._files.remove_obsolete(trainer_of(self.lightning_module))
            super().teardown()
        finally:
            self._replaced.undo_all()
            self._last_step.end()
            self._stops.detach()

    # DDP.

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._averaging.on_ddp_formed()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Leave the error as it is, with the names that :meth:`training_step` added.

        Stock replaces the text of DDP's error about unused parameters.
        """

    # Steps.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._data.resume.on_train_batch_start()
        self._data.uneven.on_train_batch_start(batch)
        if self._averaging.frozen:
            self._averaging.before_step()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._metrics.step(is_training=True):
            try:
                return super().training_step(*args, **kwargs)
            except RuntimeError as error:
                self._averaging.name_unused(error)
                raise

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._metrics.flush()  # before DDP's collectives, as in the calls below
        if self._averaging.frozen:
            self._averaging.before_backward()
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._stops.at_step()
        with self._data.evaluation.step(), self._metrics.step(is_training=False):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._stops.at_step()
        with self._data.evaluation.step(), self._metrics.step(is_training=False):
            return super().test_step(*args, **kwargs)

    @property
    def is_idle(self) -> bool:
        """Whether this rank's batch does not count in the current evaluation step.

        Hooks after the step can also read this.
        """
        return self._data.evaluation.is_idle

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._stops.at_step()
        return super().predict_step(*args, **kwargs)

    # Calls that every rank must make. Their steps, of which some calls need only a few, are:
    #
    # 1. After an exception that ended the run, return, because other ranks may never make
    #    this call. `Cooperation` has the table of the calls that still wait.
    # 2. Reduce the queued logged values (`flush`). Their collective would otherwise come
    #    after this one on some ranks and before it on others.
    # 3. Wait until every rank makes this call (`enter_…`), so that a rank which makes
    #    another one is named, and their collectives are not mixed up.
    # 4. Call Lightning's method.
    # 5. Raise if an abort of NCCL has made the received value arbitrary (`check_received`).

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Collective: every rank must call it, with the same name.

        Raises:
            RankAbsentError: a rank made a different collective call, skipped the
                barrier, or did not call it within ``timeout``.
        """
        # Also once the exception is caught: a barrier returns no value, and Lightning's call
        # after a save must not wait for ranks that do not save.
        if self._ranks.is_interrupted:
            return
        self._metrics.flush()
        has_waited = enter_call(f"barrier {name!r}" if name else "a barrier")
        # The processes have then waited for each other, but not for work that is queued on
        # accelerators.
        if self.root_device.type != "cpu" or not has_waited:
            super().barrier(name, *args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._ranks.is_handling_exception:
            return obj
        self._metrics.flush()
        trainer = trainer_of(self.lightning_module)
        is_training = trainer is not None and trainer.training
        enter_broadcast(src, caller_in_lightning(), is_training=is_training)
        received = super().broadcast(obj, src)
        check_received()
        return received

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._ranks.is_handling_exception:
            return decision
        self._metrics.flush()
        enter_decision(caller_in_lightning())
        decided = super().reduce_boolean_decision(bool(decision), all=all)
        check_received()
        return decided

    @override
    def all_gather(
        self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        self._metrics.flush()
        return super().all_gather(tensor, group, sync_grads)

    @property
    @override
    def reduce(self) -> Reduction:
        """Lightning's method; see :class:`Reduction`."""
        return Reduction(self._metrics)

    def on_rank_zero(self, work: Callable[[], T], *, what: str = "work") -> T:
        """Run ``work`` on rank 0, and return its result on every rank.

        If it raises, raise its error on every rank. Collective.

        When the Trainer is interrupted, rank 0 works alone and the other ranks get
        ``None``.
        """
        return self._ranks.on_rank_zero(work, what)  # type: ignore[no-any-return]
