"""The strategy: a switchboard that hands each of Lightning's hooks to the collaborator that answers it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ddp_ext.checkpoint.location import PathLike
from lightning_ddp_ext.durations import to_timedelta
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rendezvous.init_method import InitMethod, check_run_id, choose
from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.nccl_options import NCCLOptions
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.rendezvous.request import Timeouts
from lightning_ddp_ext.supervision.breakpoints import install_breakpointhook, restore_breakpointhook
from lightning_ddp_ext.supervision.call_site import call_site, called_by_lightning
from lightning_ddp_ext.supervision.checked_collectives import CheckedCollectives
from lightning_ddp_ext.supervision.debugger import DebuggedRank
from lightning_ddp_ext.supervision.parent_watch import watch_parent
from lightning_ddp_ext.world import World, read_world

from .callbacks.rank_debugger import debugged_rank
from .checkpoint_io import RankZeroCheckpointIO
from .checkpoints import Checkpoints
from .data_path import DataPath, Order
from .ddp import CommHook, HookName, find_hook, name_unused, register_on_cpu
from .environment import check_parts, environment_beside, ranks_of, world_of
from .evaluation import IdleRanks
from .joining import join_ranks, request_of
from .launchers import ProcessesLauncher, ScriptLauncher
from .layer_sync import RanksLayerSync
from .lightning_tree import ClusterEnvironment, TorchElasticEnvironment, pl, rank_zero_info, refuse_other_tree
from .metrics import BatchedMetrics
from .options import check_backend, check_choice, check_interface, ddp_options, refuse_unknown
from .replaced_methods import ReplacedMethods
from .resume import ResumeData
from .stopping import Stops
from .uneven import Mode as UnevenMode

T = TypeVar("T")

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

INIT_TIMEOUT = timedelta(minutes=5)
HEARTBEAT_TIMEOUT = timedelta(seconds=30)
TIMEOUT = timedelta(minutes=30)  # Lightning's, for every backend; NCCL's own would be 10 minutes

_START_METHOD_OF = {
    "ddp_ext": "popen",
    "ddp_ext_spawn": "spawn",
    "ddp_ext_fork": "fork",
    "ddp_ext_notebook": "fork",
    "ddp_ext_forkserver": "forkserver",
}
_SUFFIXES: dict[str, dict[str, bool]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}


class DDPExtStrategy(pl.strategies.DDPStrategy):
    """Lightning's ``ddp``, with an explicit choice of how the ranks find each other, and bounded ends.

    Args:
        init_method: where the ranks meet: ``"env://"`` (``MASTER_ADDR`` and ``MASTER_PORT``), ``"tcp://host:29500"``
            (rank 0 listens there), ``"file:///shared/run42"`` (a file, or a directory, on a file system that all
            hosts share), or :class:`~lightning_ddp_ext.Env`, :class:`~lightning_ddp_ext.Tcp`,
            :class:`~lightning_ddp_ext.File`. ``None``: the variable ``DDPX_INIT_METHOD``, else what Lightning's
            cluster environment says; on one node the kernel chooses a port.
        rank: this process among all, where you start one process per rank by hand; needs ``world_size``.
        world_size: how many processes there are; needs ``rank``, and must equal ``devices * num_nodes``.
        local_rank: this process among those of its host; by default ``LOCAL_RANK``, else ``rank`` modulo devices.
        run_id: names the file where ``init_method`` is a directory; the same on every rank, another one each run.
        init_timeout: seconds or ``timedelta`` that the ranks have to find each other.
        heartbeat_timeout: seconds or ``timedelta`` of silence after which a rank's host or network counts as dead; a
            process that ends is noticed at once.
        timeout: seconds or ``timedelta`` that a collective may take; ``None`` for the backend's own limit.
        devices_per_rank: how many of the Trainer's devices each rank has, for models that are spread over several:
            with ``devices=8`` and ``devices_per_rank=2`` there are 4 ranks. The module puts its parts on
            ``self.trainer.strategy.rank_devices`` in ``configure_model``; batches come to the first of them.
        start_method: how further ranks are started: ``"popen"`` runs the script again; ``"spawn"``, ``"fork"`` and
            ``"forkserver"`` start functions.
        sampler: the order of training samples, where Lightning puts a sampler into a loader: ``"torch"`` for that of
            stock Lightning, or ``"scalable"`` for a :class:`~lightning_ddp_ext.ScalableDistributedSampler`.
        exact_evaluation: whether validation and test see each sample exactly once, where Lightning puts a sampler into
            a loader; stock Lightning repeats samples until the ranks have equally many.
        idle_ranks: what a rank does in a step of an evaluation for which it has no batch: with ``"repeat"`` it
            makes the step with a batch that metrics do not count, with ``"skip"`` it makes no step and calls no hook,
            for steps without collectives. ``strategy.is_idle`` says whether this rank is idle in the present step.
        uneven_inputs: what happens where the ranks have different numbers of training batches (iterable datasets,
            loaders of one's own, samplers by rank): with ``"stop_at_shortest"`` all ranks end the epoch after the last
            step that each of them has a batch for. With ``"join"`` every batch is trained on once: a rank that has no
            more repeats its last one, without counting, until all are through, and gradients are averaged over the
            ranks that still have data. ``None``: loaders with lengths that differ are refused when training
            begins; without lengths ranks wait for the one that has ended, as with stock Lightning.
        resume_data: how far a checkpoint's data are resumed: with ``"exact"`` training goes on with the batch that is
            due and the random numbers of each rank, with ``"epoch"`` from the beginning of the epoch, for data that
            have changed, and with ``"off"`` as with stock Lightning.
        stop_checkpoint: where all ranks save when one of them gets SIGTERM, SIGUSR1 or Ctrl-C, before they end: a file
            name beside the other checkpoints, or a path; ``None`` to save nothing.
        save_deadline: seconds or ``timedelta`` that the ranks have from such a signal on, the save included, before
            they are ended without; ``None`` for 25 s under torchrun, which kills after 30, and else 10 minutes.
        debug: whether each collective that your code calls waits until all ranks have come to the same one, and names
            those that are elsewhere; takes part of a millisecond for each.
        nccl: settings of NCCL, see :class:`~lightning_ddp_ext.NCCLOptions`.
        interface: the network interface that NCCL and gloo use, ``"eth1"``.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; ``None`` chooses by the device.
        accelerator: the kind of device; the Trainer sets it.
        parallel_devices: the devices of this host, one for each rank; the Trainer sets them.
        cluster_environment: a plugin that knows ranks and address; by default the Trainer finds that of the launcher.
        checkpoint_io: writes and reads checkpoints; by default a :class:`~lightning_ddp_ext.RankZeroCheckpointIO`.
        precision_plugin: mixed precision; the Trainer makes it from ``precision=``.
        ddp_comm_state: the state of the comm hook, such as a ``PowerSGDState``.
        ddp_comm_hook: how gradients are averaged, on the CPU, too: a function, or a name: ``"fp16_compress"``,
            ``"bf16_compress"``, ``"power_sgd"`` (torch's), or ``"ring"`` (:func:`~lightning_ddp_ext.ring_all_reduce`).
        ddp_comm_wrapper: wraps the comm hook, such as ``fp16_compress_wrapper``.
        model_averaging_period: steps between two averages of the model, with post-local SGD.
        dim: the dimension along which DDP would split a batch over the devices of a rank. This and all that follow
            are those of :class:`torch.nn.parallel.DistributedDataParallel`.
        broadcast_buffers: send rank 0's buffers to all ranks before each forward pass; ``None``: torch's default, yes.
        init_sync: compare the shapes of parameters and send rank 0's to all ranks when training begins.
        process_group: the ranks that average gradients; ``None`` for all.
        bucket_cap_mb: MiB of gradients that travel together; ``None`` for 25.
        find_unused_parameters: look in each step for parameters that the loss does not use, instead of raising.
        check_reduction: has no effect any more.
        gradient_as_bucket_view: gradients are views of what travels, which saves a copy and their memory.
        static_graph: promise that each step uses the same parameters.
        delay_all_reduce_named_params: parameters whose gradients travel together at the end of the backward pass.
        param_to_hook_all_reduce: the parameter whose gradient starts that transfer.
        mixed_precision: DDP's own mixed precision, apart from the Trainer's.
        device_mesh: a mesh of ranks, for use with tensor parallelism.
        skip_all_reduce_unused_params: leave parameters that no rank has used out of the all-reduce.
        bucket_cap_mb_list: MiB of each bucket of gradients; needs a torch that has it.
        batched_grad_copy: copy the gradients of a bucket in one go; needs a torch that has it.
        forward_sync_buffers: torch's newer name of ``broadcast_buffers``; needs a torch that has it.

    Raises:
        ConfigurationError: ``init_method`` or ``DDPX_INIT_METHOD`` is malformed, or they differ.
        ConfigurationError: a timeout is not positive.
        ConfigurationError: ``rank``, ``world_size`` and the Trainer's ``devices`` and ``num_nodes`` do not fit
            together.
        ConfigurationError: an argument, a value or a comm hook of that name does not exist, here or in the installed
            torch.

    Example::

        trainer = L.Trainer(strategy=DDPExtStrategy(init_method="file:///shared/run42"), devices=2)
    """

    strategy_name = "ddp_ext"

    _given_names: frozenset[str] = frozenset()

    @refuse_unknown
    def __init__(
        self,
        init_method: str | InitMethod | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
        run_id: str | None = None,
        init_timeout: float | timedelta = INIT_TIMEOUT,
        heartbeat_timeout: float | timedelta = HEARTBEAT_TIMEOUT,
        timeout: float | timedelta | None = TIMEOUT,
        devices_per_rank: int = 1,
        start_method: StartMethod = "popen",
        sampler: Order = "torch",
        exact_evaluation: bool = True,
        idle_ranks: IdleRanks = "repeat",
        uneven_inputs: UnevenMode | None = None,
        resume_data: ResumeData = "exact",
        stop_checkpoint: PathLike | None = "preempted.ckpt",
        save_deadline: float | timedelta | None = None,
        debug: bool = False,
        nccl: NCCLOptions | None = None,
        interface: str | None = None,
        process_group_backend: str | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: pl.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: HookName | CommHook | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        check_choice("start_method", start_method, *get_args(StartMethod))
        check_backend(process_group_backend)
        hook, ddp_comm_state = find_hook(ddp_comm_hook, ddp_comm_state)
        options = ddp_options(DDPExtStrategy.__init__, locals(), self._given_names)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=to_timedelta(timeout, field="timeout"),
            start_method=start_method,
            **options,
        )
        if devices_per_rank < 1:
            raise ConfigurationError(f"devices_per_rank must be at least 1 (got {devices_per_rank})")
        check_run_id(run_id)
        self._rank_arguments = {"rank": rank, "world_size": world_size, "local_rank": local_rank}
        read_world({}, **self._rank_arguments)  # refuses what does not fit together
        self.chosen_init_method = choose(init_method, os.environ)
        self.run_id = run_id
        self.devices_per_rank = devices_per_rank
        self.init_timeout = to_timedelta(init_timeout, field="init_timeout") or INIT_TIMEOUT  # None from a config file
        heartbeat = to_timedelta(heartbeat_timeout, field="heartbeat_timeout") or HEARTBEAT_TIMEOUT
        self.timeouts = Timeouts(heartbeat=heartbeat.total_seconds())
        self.stop_checkpoint = stop_checkpoint
        self.averaging_period = model_averaging_period
        self.checkpoints = Checkpoints(self)
        self.data = DataPath(
            self,
            order=sampler,
            exact_evaluation=exact_evaluation,
            uneven_inputs=uneven_inputs,
            resume_data=resume_data,
            idle_ranks=idle_ranks,
        )
        self.metrics = BatchedMetrics(self)
        self.stops = Stops(self, to_timedelta(save_deadline, field="save_deadline"))
        self.debugged: DebuggedRank | None = None
        self._checks_collectives = debug
        self._checked: CheckedCollectives | None = None
        self._nccl, self._interface = nccl, interface
        self._comm_hook = hook, ddp_comm_state, ddp_comm_wrapper
        self._frozen: list[torch.nn.Parameter] = []
        self._replaced = ReplacedMethods()

    # Who this process is.

    @property
    def world(self) -> World:
        """This process's place among all; right from the Trainer's construction on."""
        return world_of(self)

    @override
    def set_world_ranks(self) -> None:
        self.cluster_environment = environment_beside(
            self.cluster_environment, self._rank_arguments, devices=self.num_processes, num_nodes=self.num_nodes
        )
        super().set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(self)
        else:
            self._launcher = ProcessesLauncher(self, self._start_method)

    # Devices.

    @property
    @override
    def num_processes(self) -> int:
        return ranks_of(len(self.parallel_devices or ()), per_rank=self.devices_per_rank)

    @property
    def rank_devices(self) -> list[torch.device]:
        """This rank's devices: one, or ``devices_per_rank``; on the CPU each is the CPU."""
        first = self.local_rank * self.devices_per_rank
        return (self.parallel_devices or [])[first : first + self.devices_per_rank]

    @property
    @override
    def root_device(self) -> torch.device:
        return self.rank_devices[0]

    @override
    def determine_ddp_device_ids(self) -> list[int] | None:
        return None if self.devices_per_rank > 1 else super().determine_ddp_device_ids()

    @override
    def model_to_device(self) -> None:
        if self.devices_per_rank == 1:
            super().model_to_device()
        else:
            assert self.model is not None
            check_parts(self.model, self.rank_devices)

    # Finding the others.

    @override
    def setup_distributed(self) -> None:
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            watch_parent()  # torchrun's agent; other launchers have put their ranks' end in order themselves
        self.set_world_ranks()
        check_interface(self._interface)
        join_ranks(request_of(self))
        super().setup_distributed()  # finds the group that is open and leaves it alone

    # Checkpoints.

    @property
    @override
    def checkpoint_io(self) -> pl.plugins.CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = RankZeroCheckpointIO()
            self._checkpoint_io.is_default = True
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: pl.plugins.CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any | None = None
    ) -> None:
        self.data.training.save_to(checkpoint, f"saving {os.fspath(filepath)}")
        self.checkpoints.save(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: PathLike) -> None:
        self.checkpoints.remove(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = self.checkpoints.load(checkpoint_path, weights_only)
        self.data.training.load(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.checkpoints.load_weights(super().load_model_state_dict, checkpoint, strict)

    # The Trainer that the ranks work for.

    @property
    def current_trainer(self) -> Any:
        """The Trainer that runs the model."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @override
    def setup_environment(self) -> None:
        trainer = self.current_trainer
        refuse_other_tree(self.checkpoint_io, *trainer.callbacks)
        self.debugged = debugged_rank(trainer)
        super().setup_environment()
        context = current()
        if self.debugged is not None:
            self.debugged.wait_if_debugged(self.global_rank)
        if self.world_size > 1:
            install_breakpointhook(self.global_rank)
        self._replaced.restore_what_rank_zero_does(trainer)
        self.data.attach(trainer, self._replaced)
        self.metrics.start()
        self.stops.attach(trainer, context, self._replaced)
        if self._checks_collectives and context is not None:
            self._checked = CheckedCollectives(context)
            self._checked.install()

    def _start(self) -> None:
        self._pass()
        self.stops.on_start()

    @override
    def on_train_start(self) -> None:
        self._start()
        self.data.training.resume.on_train_start()

    @override
    def on_validation_start(self) -> None:
        self._start()
        self.data.training.on_validation_start()

    on_test_start = on_predict_start = _start

    @override
    def on_train_end(self) -> None:
        self._pass()
        self.stops.at_end()

    def _end_evaluation(self) -> None:
        self.data.evaluation.end()
        self._pass()
        self.stops.at_end_of_evaluation()

    @override
    def on_validation_end(self) -> None:
        self.data.training.resume.on_validation_end()
        self._end_evaluation()

    on_test_end = on_predict_end = _end_evaluation

    @override
    def teardown(self) -> None:
        if self._checked is not None:
            self._checked.restore()
        try:
            self.checkpoints.finish()
            super().teardown()
        finally:
            self._replaced.put_back()
            self.stops.detach()
            restore_breakpointhook()

    # BatchNorm.

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if type(self._layer_sync) is pl.plugins.TorchSyncBatchNorm:
            self._layer_sync = RanksLayerSync()
        super().setup(trainer)

    # DDP.

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if self.root_device.type == "cpu":
            register_on_cpu(self.model, *self._comm_hook)
        self._frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]

    def _reform_ddp(self) -> None:
        """Form DDP anew with parameters that were unfrozen: it averages the gradients of those alone that it knows.

        See https://github.com/Lightning-AI/pytorch-lightning/issues/20340.
        """
        unfrozen = sum(parameter.requires_grad for parameter in self._frozen)
        if unfrozen:
            rank_zero_info(f"formed DDP anew, as {unfrozen} parameters that it did not know are no longer frozen")
            self.model = self.lightning_module
            self._pl_static_graph_delay_done = False
            self.configure_ddp()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.lightning_module is not None:
            name_unused(exception, self.lightning_module)

    # Data.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._reform_ddp()
        self.data.on_train_batch_start(batch)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        return dataloader if self.lightning_module is None else self.data.wrap(dataloader)

    # Working together.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._advance()
        self.stops.on_training_step()
        with self.data.uneven.step(), self.metrics.step(is_training=True):
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.data.uneven.idle_layers():
            return super().backward(self.data.uneven.weigh(closure_loss), optimizer, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.stops.at_step()
        with self.data.evaluation.step(), self.metrics.step(is_training=False):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self.stops.at_step()
        with self.data.evaluation.step(), self.metrics.step(is_training=False):
            return super().test_step(*args, **kwargs)

    @property
    def is_idle(self) -> bool:
        """Whether this rank's present batch is one that does not count, in hooks, too."""
        return self.data.is_idle

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self.stops.at_step()
        return super().predict_step(*args, **kwargs)

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Collective: every rank must call it, with the same name.

        Raises:
            RankAbsentError: a rank is in another barrier, or in another call that every rank must make.
            RankAbsentError: a rank has gone on without it, or has not come within ``timeout``.
        """
        # After an exception some ranks never come: callbacks that save a checkpoint then must not wait for them.
        if self.checkpoints.is_interrupted:
            return
        call = self._begin(f"barrier {name!r}" if name else "a barrier")
        context = current()
        if context is not None and call is not None:
            context.barriers.wait(call)
        if context is None or self.root_device.type != "cpu":  # what an accelerator was given before is done, too
            super().barrier(name, *args, **kwargs)
        self.stops.at_barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self.checkpoints.is_handling_exception:
            return obj
        is_training = self.lightning_module is not None and self.lightning_module.trainer.training
        if not (is_training and called_by_lightning()):  # max_time and the like broadcast at every batch
            self._begin(f"broadcast from rank {src}")
        return super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.checkpoints.is_handling_exception:
            return decision
        self._begin("a decision of all ranks (reduce_boolean_decision)")
        return super().reduce_boolean_decision(decision, all)

    @override
    def reduce(self, tensor: T, group: Any | None = None, reduce_op: Any = "mean") -> T:
        if self.checkpoints.is_handling_exception:
            return tensor
        return self.metrics.reduce(tensor, group, reduce_op)  # type: ignore[no-any-return]

    def on_rank_zero(self, work: Callable[[], T], *, what: str = "work") -> T:
        """Run ``work`` on rank 0 and give every rank its result or its error. Collective: every rank must call it.

        When the Trainer is interrupted, rank 0 works alone and the other ranks get ``None``.
        """
        return self.checkpoints.on_rank_zero(work, what)  # type: ignore[no-any-return]

    def _begin(self, what: str) -> Call | None:
        """Say that this rank begins a call that every rank must make, and that is rare enough to say so."""
        context = current()
        return None if context is None else context.barriers.begin(what, call_site())

    def _advance(self) -> None:
        """Advance this rank's step counter, so that a skipped call can be detected."""
        context = current()
        if context is not None:
            context.barriers.advance()

    def _pass(self) -> None:
        """Advance it where ranks with different numbers of batches might come at other steps, or not at all."""
        if self.data.uneven.are_even:
            self._advance()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register every name; a second call replaces the entries by the same."""
        for name, start_method in _START_METHOD_OF.items():
            for suffix, options in _SUFFIXES.items():
                strategy_registry.register(
                    name + suffix,
                    cls,
                    description=f"DDPExtStrategy by {start_method}{suffix}",
                    override=True,
                    start_method=start_method,
                    **options,
                )


def register() -> None:
    """Make the strategy names known to the Trainer."""
    DDPExtStrategy.register_strategies(pl.strategies.StrategyRegistry)
