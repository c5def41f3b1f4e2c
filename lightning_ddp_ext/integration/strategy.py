"""The strategy: a switchboard that hands each of Lightning's hooks to the room that answers it."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torchmetrics
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ddp_ext.checkpoint.location import PathLike
from lightning_ddp_ext.durations import to_timedelta
from lightning_ddp_ext.errors import OptionError, WorldError
from lightning_ddp_ext.rendezvous.endpoint import Endpoint, FileEndpoint
from lightning_ddp_ext.rendezvous.init_method import Env, InitMethod, check_run_id, choose
from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.nccl_options import NCCLOptions, misspelt
from lightning_ddp_ext.rendezvous.nccl_options import apply as apply_options
from lightning_ddp_ext.rendezvous.process_context import current, join
from lightning_ddp_ext.rendezvous.request import Request, Timeouts
from lightning_ddp_ext.supervision.breakpoints import install_breakpointhook, restore_breakpointhook
from lightning_ddp_ext.supervision.call_site import call_site, called_by_lightning
from lightning_ddp_ext.supervision.checked_collectives import CheckedCollectives
from lightning_ddp_ext.supervision.debugger import DebuggedRank
from lightning_ddp_ext.supervision.exception_report import install_excepthook
from lightning_ddp_ext.supervision.parent_watch import watch_parent
from lightning_ddp_ext.supervision.rank_processes import started_ranks
from lightning_ddp_ext.supervision.survey import Survey
from lightning_ddp_ext.world import World, check_devices, read_world

from .callbacks.rank_debugger import debugged_rank
from .checkpoint_io import RankZeroCheckpointIO
from .checkpoints import Checkpoints, agree_on_path
from .comm_hooks import CommHook, HookName, find_hook, register_on_cpu
from .compat import ReplacedMethods
from .data_path import DataPath, Order
from .endpoints import endpoint_of
from .environment import WorldEnvironment, source_of
from .evaluation import IdleRanks
from .launchers import ProcessesLauncher, ScriptLauncher
from .layer_sync import RanksLayerSync
from .lightning_tree import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    LightningEnvironment,
    Precision,
    SLURMEnvironment,
    StrategyRegistry,
    TorchElasticEnvironment,
    TorchSyncBatchNorm,
    Trainer,
    lightning_name,
    lightning_version,
    rank_zero_info,
    rank_zero_warn,
    refuse_other_tree,
)
from .metrics import BatchedMetrics
from .resume import ResumeData
from .stopping import Stops
from .uneven import Mode as UnevenMode
from .unused_parameters import name_unused

P = ParamSpec("P")
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


def _refuse_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Have ``init`` refuse an unknown argument by name, with the nearest one that exists; its signature stays."""
    known = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                raise _unknown_option(name, known)
        strategy: Any = args[0]
        strategy._given_names = frozenset(kwargs)
        init(*args, **kwargs)

    return checked


class DDPExtStrategy(DDPStrategy):
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
        accelerator: see ``DDPStrategy``.
        parallel_devices: see ``DDPStrategy``.
        cluster_environment: see ``DDPStrategy``.
        checkpoint_io: writes and reads checkpoints; by default a :class:`~lightning_ddp_ext.RankZeroCheckpointIO`.
        precision_plugin: see ``DDPStrategy``.
        ddp_comm_state: see ``DDPStrategy``.
        ddp_comm_hook: how gradients are averaged, on the CPU, too: a function (see ``DDPStrategy``), or a name:
            ``"fp16_compress"``, ``"bf16_compress"``, ``"power_sgd"`` (torch's), or ``"ring"``
            (:func:`~lightning_ddp_ext.ring_all_reduce`).
        ddp_comm_wrapper: see ``DDPStrategy``.
        model_averaging_period: see ``DDPStrategy``.
        dim: this and all that follow: see :class:`torch.nn.parallel.DistributedDataParallel`.
        broadcast_buffers: see there.
        init_sync: see there.
        process_group: see there.
        bucket_cap_mb: see there.
        find_unused_parameters: see there.
        check_reduction: see there.
        gradient_as_bucket_view: see there.
        static_graph: see there.
        delay_all_reduce_named_params: see there.
        param_to_hook_all_reduce: see there.
        mixed_precision: see there.
        device_mesh: see there.
        skip_all_reduce_unused_params: see there.
        bucket_cap_mb_list: see there; needs a torch that has it.
        batched_grad_copy: see there; needs a torch that has it.
        forward_sync_buffers: see there; needs a torch that has it.

    Raises:
        InitMethodError: ``init_method`` or ``DDPX_INIT_METHOD`` is malformed, or they differ.
        DurationError: a timeout is not positive.
        WorldError: ``rank``, ``world_size`` and the Trainer's ``devices`` and ``num_nodes`` do not fit together.
        OptionError: an argument or a comm hook of that name does not exist, here or in the installed torch.
        ConfigurationError: ``uneven_inputs`` is none of its values.

    Example::

        trainer = L.Trainer(strategy=DDPExtStrategy(init_method="file:///shared/run42"), devices=2)
    """

    strategy_name = "ddp_ext"

    _given_names: frozenset[str] = frozenset()

    @_refuse_unknown
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
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
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
        hook, ddp_comm_state = find_hook(ddp_comm_hook, ddp_comm_state)
        names = _ddp_options().keys()
        options = {name: value for name, value in locals().items() if name in names}
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
            **_chosen_options(options, self._given_names),
        )
        if devices_per_rank < 1:
            raise OptionError(f"devices_per_rank must be at least 1 (got {devices_per_rank})")
        self.devices_per_rank = devices_per_rank
        self.chosen_init_method = choose(init_method, os.environ)
        self._rank_argument = rank
        self._world_size_argument = world_size
        self._local_rank_argument = local_rank
        check_run_id(run_id)
        self.run_id = run_id
        self._init_timeout = to_timedelta(init_timeout, field="init_timeout") or INIT_TIMEOUT  # None from a config file
        heartbeat = to_timedelta(heartbeat_timeout, field="heartbeat_timeout") or HEARTBEAT_TIMEOUT
        self.timeouts = Timeouts(heartbeat=heartbeat.total_seconds())
        self._replaced = ReplacedMethods()
        self.checkpoints = Checkpoints(self)
        self.stop_checkpoint = stop_checkpoint
        self.data = DataPath(
            self,
            order=sampler,
            exact_evaluation=exact_evaluation,
            uneven_inputs=uneven_inputs,
            resume_data=resume_data,
            idle_ranks=idle_ranks,
        )
        self.stops = Stops(self, stop_checkpoint, to_timedelta(save_deadline, field="save_deadline"))
        self.metrics = BatchedMetrics(self)
        self._nccl, self._interface = nccl, interface
        self._comm_hook = hook, ddp_comm_state, ddp_comm_wrapper
        self._frozen: list[torch.nn.Parameter] = []
        self.averaging_period = model_averaging_period
        self._debug = debug
        self._checked: CheckedCollectives | None = None
        self._debugged: DebuggedRank | None = None
        # Refuses a rank out of range and a rank without a world size, here rather than in the Trainer.
        read_world({}, rank=rank, world_size=world_size, local_rank=local_rank)

    @property
    def world(self) -> World:
        """This process's place among all; right from the Trainer's construction on."""
        environment = self.cluster_environment
        if isinstance(environment, WorldEnvironment):
            return environment.world
        assert environment is not None
        return World(
            rank=self.global_rank,
            world_size=self.num_nodes * self.num_processes,
            local_rank=self.local_rank,
            local_world_size=self.num_processes,
            node_rank=self.node_rank,
            source=source_of(environment),
        )

    # Who this process is.

    @override
    def set_world_ranks(self) -> None:
        self._believe_the_launcher()
        super().set_world_ranks()

    def _believe_the_launcher(self) -> None:
        """Put in an environment of our own where Lightning's does not know how this process was started."""
        environment = self.cluster_environment
        if type(environment) not in (LightningEnvironment, SLURMEnvironment) or started_ranks() is not None:
            self._refuse_other_rank()
            return
        world = self._read_world()
        if world is None or (type(environment) is SLURMEnvironment and world.source == "SLURM"):
            return
        check_devices(world, devices=self.num_processes, num_nodes=self.num_nodes)
        self.cluster_environment = WorldEnvironment(world)

    def _refuse_other_rank(self) -> None:
        """Arguments that contradict a launcher are a mistake, whichever of them is wrong."""
        environment = self.cluster_environment
        if self._rank_argument is None or environment is None or not environment.creates_processes_externally:
            return
        found = (environment.global_rank(), environment.world_size())
        if found != (self._rank_argument, self._world_size_argument):
            raise WorldError(
                f"rank={self._rank_argument} and world_size={self._world_size_argument} contradict "
                f"{source_of(environment)}, by which this process is rank {found[0]} of {found[1]}; leave the "
                "arguments out, or start the processes by hand"
            )

    def _read_world(self) -> World | None:
        def read(devices: int | None) -> World | None:
            return read_world(
                os.environ,
                rank=self._rank_argument,
                world_size=self._world_size_argument,
                local_rank=self._local_rank_argument,
                devices=devices,
            )

        try:
            return read(self.num_processes)
        except WorldError:
            # With fewer devices than ranks a local rank looks wrong: then it is the devices that have to be named.
            world = read(None)
            if world is not None:
                check_devices(world, devices=self.num_processes, num_nodes=self.num_nodes)
            raise

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
        devices, per_rank = len(self.parallel_devices or ()), self.devices_per_rank
        if devices % per_rank:
            raise OptionError(
                f"devices must be a multiple of devices_per_rank={per_rank} (got {devices}); choose "
                f"{devices - devices % per_rank} or {devices + per_rank - devices % per_rank} devices"
            )
        return devices // per_rank

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
            return
        assert self.model is not None
        for module in self.model.modules():
            if isinstance(module, torchmetrics.Metric):
                module.to(self.root_device)
        for name, parameter in self.model.named_parameters():
            if parameter.device not in self.rank_devices:
                raise OptionError(
                    f"with devices_per_rank={self.devices_per_rank} the module places its parts by itself, and {name} "
                    f"is on {parameter.device}; put it on one of self.trainer.strategy.rank_devices "
                    f"({', '.join(map(str, self.rank_devices))}) in configure_model"
                )

    # Finding the others.

    @override
    def setup_distributed(self) -> None:
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            watch_parent()  # torchrun's agent; other launchers have put their ranks' end in order themselves
        self.set_world_ranks()
        is_first = current() is None
        apply_options(self._nccl, self._interface, os.environ)
        if is_first:
            for sentence in misspelt(os.environ):
                rank_zero_warn(sentence)
        request = self._request()
        context = join(request)
        if is_first and context is not None:
            rank_zero_info(
                f"process group: {request.backend}, {request.world.world_size} "
                f"rank{'' if request.world.world_size == 1 else 's'}, {request.init_method}"
            )
        if context is not None:
            context.component(Survey)  # so that it answers the others
        install_excepthook()
        super().setup_distributed()  # finds the group that is open and leaves it alone

    def _request(self) -> Request:
        started = started_ranks()
        request = Request(
            world=self.world,
            init_method=str(self.chosen_init_method or Env()),
            is_explicit=self.chosen_init_method is not None,
            endpoint=self._endpoint(),
            backend=self._get_process_group_backend(),
            device=self.root_device,
            timeout=self._timeout,
            init_timeout=self._init_timeout,
            versions=_versions(),
            absence=started.scripts.failure if started is not None else lambda: None,
            timeouts=self.timeouts,
        )
        return request if self._debugged is None else self._debugged.without_limits(request)

    def _endpoint(self) -> Endpoint:
        """Where rank 0 listens; of no use where the ranks are connected already, or where there is one."""
        context = current()
        is_connected = context is not None and len(context.table) > 1
        if is_connected or torch.distributed.is_initialized() or self.world.world_size == 1:
            return FileEndpoint("")
        assert self.cluster_environment is not None
        started = started_ranks()
        environ = {**os.environ, **(started.variables if started is not None else {})}
        return endpoint_of(
            self.chosen_init_method, self.cluster_environment, environ, run_id=self.run_id, num_nodes=self.num_nodes
        )

    # Checkpoints.

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = RankZeroCheckpointIO()
            self._checkpoint_io.is_default = True
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
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

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        refuse_other_tree(self.checkpoint_io, *trainer.callbacks)
        self._debugged = debugged_rank(trainer)
        super().setup_environment()
        context = current()
        if self._debugged is not None:
            self._debugged.wait_if_debugged(self.global_rank)
        if self.world_size > 1:
            install_breakpointhook(self.global_rank)
        agree_on_path(trainer, self._replaced)
        self.data.attach(trainer)
        self.metrics.start()
        self.stops.attach(trainer, context)
        if self._debug and context is not None:
            self._checked = CheckedCollectives(context)
            self._checked.install()

    @override
    def on_train_start(self) -> None:
        self._start()
        self.data.training.resume.on_train_start()

    @override
    def on_validation_start(self) -> None:
        self._start()
        self.data.training.on_validation_start()

    @override
    def on_test_start(self) -> None:
        self._start()

    @override
    def on_predict_start(self) -> None:
        self._start()

    def _start(self) -> None:
        self._pass()
        self.stops.on_start()

    @override
    def on_train_end(self) -> None:
        self._pass()
        self.stops.at_end()

    @override
    def on_validation_end(self) -> None:
        self.data.training.resume.on_validation_end()
        self._end_evaluation()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        self.data.evaluation.end()
        self._pass()
        self.stops.at_end_of_evaluation()

    @override
    def teardown(self) -> None:
        if self._checked is not None:
            self._checked.restore()
        try:
            self.checkpoints.finish()
            self.data.detach()
            super().teardown()
        finally:
            self._replaced.put_back()
            self.stops.detach()
            restore_breakpointhook()

    # BatchNorm.

    @override
    def setup(self, trainer: Trainer) -> None:
        if type(self._layer_sync) is TorchSyncBatchNorm:
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
            RankMismatchError: a rank is in another barrier, or in another call that every rank must make.
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
        if not (self._is_training and called_by_lightning()):  # max_time and the like broadcast at every batch
            self._begin(f"broadcast from rank {src}")
        return super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.checkpoints.is_handling_exception:
            return decision
        self._begin("reduce_boolean_decision")
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

    @property
    def _is_training(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.training

    def _advance(self) -> None:
        """Pass a point that all ranks pass: calls that others began before it, and this rank did not, it will miss."""
        context = current()
        if context is not None:
            context.barriers.advance()

    def _pass(self) -> None:
        """The same for what ranks do at other batches, or not at all, where they have different numbers of them."""
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
                    description=f"DDPExtStrategy with start_method={start_method!r}{_described(options)}",
                    override=True,
                    start_method=start_method,
                    **options,
                )


_SUFFIXES: dict[str, dict[str, bool]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}


def register() -> None:
    """Make the strategy names known to the Trainer."""
    DDPExtStrategy.register_strategies(StrategyRegistry)


def _described(options: dict[str, bool]) -> str:
    return "".join(f" and {name}={value}" for name, value in options.items())


def _ddp_options() -> dict[str, Any]:
    """DDP's options as this class takes them, and their defaults here."""
    names = list(inspect.signature(DDPExtStrategy.__init__).parameters.values())
    first = next(index for index, parameter in enumerate(names) if parameter.name == "dim")
    return {parameter.name: parameter.default for parameter in names[first:]}


def _chosen_options(options: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """The options that were given, or differ from their default: others may not exist in the installed torch."""
    defaults = _ddp_options()
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    for name, value in options.items():
        if value is not defaults[name] and name not in known:
            raise OptionError(
                f"{name} is no option of DistributedDataParallel in torch {torch.__version__} (got {value!r}); "
                "leave it out, or install a torch that has it"
            )
    given = given & known.keys()
    return {name: value for name, value in options.items() if name in given or value is not defaults[name]}


def _unknown_option(name: str, known: list[str]) -> OptionError:
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "see help(DDPExtStrategy) for those that exist"
    return OptionError(f"DDPExtStrategy has no argument {name!r}; {remedy}")


def _versions() -> dict[str, str]:
    from lightning_ddp_ext import __version__

    return {
        "torch": str(torch.__version__),
        lightning_name: lightning_version,
        "torchmetrics": torchmetrics.__version__,
        "lightning_ddp_ext": __version__,
    }
