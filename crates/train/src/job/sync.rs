//! `parallel.sync`: how the replicas of a model agree, and what does not go together with each way.

use std::ops::Bound;

use polyreme_dtype::DType;
use polyreme_parallel::ServerPlan;

use super::cursor::Cursor;
use super::declare::{keys, section};
use super::parallel::RANKS_MAX;
use super::section::Section;
use super::shape::Bounds;
use super::spec::{Balance, ParallelSpec, PrecisionKind, TrainSpec};
use super::train::COUNT_MAX;
use super::types::{Type, either, flag, maybe, one_of, table, whole, within};

/// The program of a run has the passes of all its steps.
pub(super) const EVERY_MAX: u64 = 1 << 10;
/// More parts than this are shorter than a network is slow.
pub(super) const FRAGMENTS_MAX: u64 = 1 << 8;
/// With parts that take turns, replicas have all weights in common after so many turns of each, unless a program would be too long.
const ROUNDS: usize = 8;
/// More than this is a slip: the outer step would leap far beyond the replicas' mean.
const OUTER_LR: Bounds = Bounds { low: Bound::Excluded(0.0), high: Bound::Included(10.0) };
/// A rank that is further ahead than this is not held back at all.
pub(super) const STALENESS_MAX: u64 = 1 << 20;
/// A momentum of 1 never forgets.
const OUTER_MOMENTUM: Bounds = Bounds { low: Bound::Included(0.0), high: Bound::Excluded(1.0) };

/// Where parameter servers are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServersSpec {
    /// So many, each beside one of the first ranks.
    Beside(usize),
    /// On ranks that do nothing else.
    Apart(ServingRanks),
}

/// Ranks that only serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServingRanks {
    /// How many, the first ones.
    pub ranks: usize,
    /// Whether workers that outnumber them have servers beside them too.
    pub share: bool,
}

impl Default for ServersSpec {
    fn default() -> ServersSpec {
        ServersSpec::Beside(1)
    }
}

/// How replicas agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SyncKind {
    /// In every step gradients are summed over all of them.
    #[default]
    AllReduce,
    /// Each takes steps of its own, and after some of them their weights are averaged.
    Local,
    /// Parameter servers hold the weights, and apply the gradients of all ranks together.
    Ps,
    /// They apply gradients as they come, and no rank runs far ahead.
    PsBounded,
    /// They apply gradients as they come.
    PsAsync,
}

/// What is done with the mean of the replicas' weights, beside taking it over.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OuterSpec {
    /// The learning rate of the outer step.
    pub lr: f64,
    /// Its momentum.
    pub momentum: f64,
}

impl Default for OuterSpec {
    fn default() -> OuterSpec {
        OuterSpec { lr: 0.7, momentum: 0.9 }
    }
}

/// How many steps replicas take by themselves.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EverySpec {
    /// At most so many.
    pub steps: usize,
    /// Fewer if they have come further than this from the weights of the last exchange, as a share of their norm.
    pub drift: Option<f64>,
    /// After how many steps they look; `None`: after a tenth of `steps`.
    pub look: Option<usize>,
}

impl EverySpec {
    /// After how many steps replicas look how far they have come.
    pub fn look(&self) -> usize {
        self.look.unwrap_or(self.steps / 10).max(1)
    }
}

impl Default for EverySpec {
    fn default() -> EverySpec {
        EverySpec { steps: 50, drift: None, look: None }
    }
}

impl SyncKind {
    /// All of them.
    pub const ALL: [SyncKind; 5] =
        [SyncKind::AllReduce, SyncKind::Local, SyncKind::Ps, SyncKind::PsBounded, SyncKind::PsAsync];

    /// Whether parameter servers hold the weights.
    pub fn has_servers(self) -> bool {
        match self {
            SyncKind::AllReduce | SyncKind::Local => false,
            SyncKind::Ps | SyncKind::PsBounded | SyncKind::PsAsync => true,
        }
    }

    /// The name, as a job file has it.
    pub fn name(self) -> &'static str {
        match self {
            SyncKind::AllReduce => "allreduce",
            SyncKind::Local => "local",
            SyncKind::Ps => "ps",
            SyncKind::PsBounded => "ps-bounded",
            SyncKind::PsAsync => "ps-async",
        }
    }

    fn words(self) -> &'static str {
        match self {
            SyncKind::AllReduce => "gradients are summed over all ranks of `data` in every step",
            SyncKind::Local => {
                "each rank of `data` takes `every` steps with weights of its own, which are then averaged"
            }
            SyncKind::Ps => "parameter servers apply the gradients of all ranks together in every step",
            SyncKind::PsBounded => {
                "ranks do steps as they come to them, `staleness` ahead of the slowest; servers apply gradients on arrival"
            }
            SyncKind::PsAsync => "ranks do steps as they come to them; servers apply gradients on arrival",
        }
    }
}

/// After how many steps replicas agree in another way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SyncTurn {
    /// How they do before.
    pub start: SyncKind,
    /// And from then on.
    pub then: SyncKind,
    /// The number of steps.
    pub after: u64,
}

/// `sync` as a job file has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SyncChoice {
    /// One way for the whole run.
    Always(SyncKind),
    /// Two.
    Turned(SyncTurn),
}

/// How a way stands in a job file.
fn kind() -> Type<SyncKind> {
    one_of(SyncKind::ALL.map(|kind| (kind.name(), kind, kind.words())))
}

/// How the choice does.
pub(super) fn sync() -> Type<SyncChoice> {
    let always = kind().map(SyncChoice::Always, |choice| match choice {
        SyncChoice::Always(kind) => Some(*kind),
        SyncChoice::Turned(_) => None,
    });
    let turned = table::<SyncTurn>().map(SyncChoice::Turned, |choice| match choice {
        SyncChoice::Turned(turn) => Some(*turn),
        SyncChoice::Always(_) => None,
    });
    either(always, turned)
}

/// How servers stand in a job file.
pub(super) fn servers() -> Type<ServersSpec> {
    let beside = whole(1..=RANKS_MAX).map(ServersSpec::Beside, |servers| match servers {
        ServersSpec::Beside(n) => Some(*n),
        ServersSpec::Apart(_) => None,
    });
    let apart = table::<ServingRanks>().map(ServersSpec::Apart, |servers| match servers {
        ServersSpec::Apart(ranks) => Some(*ranks),
        ServersSpec::Beside(_) => None,
    });
    either(beside, apart)
}

section! { ServingRanks => {
    let keys = keys! { ServingRanks;
        /// how many ranks have a server and no samples: the first ones
        ranks: whole(1..=RANKS_MAX) => |s| Some(&mut s.ranks); needed "write how many ranks only serve, such as ranks = 2";
        /// where more ranks learn, each of these has a server beside it as well, with so much less of the parameters that all links carry the same
        share: flag() => |s| Some(&mut s.share);
    };
    let start = |_| ServingRanks { ranks: 1, share: true };
    Section::new("parallel.servers", "a number, or a table such as { ranks = 2 }", start, keys)
} }

section! { SyncTurn => {
    let keys = keys! { SyncTurn;
        /// how the ranks of `data` agree at first
        start: kind() => |s| Some(&mut s.start);
        /// how they do later
        then: kind() => |s| Some(&mut s.then); needed "write how they agree later, such as then = \"local\"";
        /// after how many steps of the run; there is a checkpoint of that step
        after: whole(1..=COUNT_MAX) => |s| Some(&mut s.after); needed "write a number of steps, such as after = 1000";
    };
    let words = "a name, or a table such as { start = \"allreduce\", then = \"local\", after = 1000 }";
    let start = |_| SyncTurn { start: SyncKind::AllReduce, then: SyncKind::Local, after: 1000 };
    Section::new("parallel.sync", words, start, keys).check(|turn, c| {
        if turn.start == turn.then {
            c.fault("then", "`parallel.sync` changes nothing", "name two ways, or write one of them alone");
        }
    })
} }

/// How many steps stand in a job file.
pub(super) fn every() -> Type<EverySpec> {
    let steps = whole(1..=EVERY_MAX).map(
        |steps| EverySpec { steps, ..EverySpec::default() },
        |every| (every.drift.is_none() && every.look.is_none()).then_some(every.steps),
    );
    either(steps, table())
}

section! { EverySpec => {
    let keys = keys! { EverySpec;
        /// at most so many steps
        steps: whole(1..=EVERY_MAX) => |s| Some(&mut s.steps); needed "write the most steps, such as steps = 50";
        /// fewer if ranks have come further from the weights of the last exchange: the root mean square of their distances, as a share of the norm of these weights
        drift: maybe(within(Bounds::POSITIVE)) => |s| Some(&mut s.drift); or "any";
        /// after how many steps ranks look how far they have come, and again after as many; they hear of it one step later
        look: maybe(whole(1..=EVERY_MAX)) => |s| Some(&mut s.look); or "a tenth of `steps`";
    };
    let words = "a table such as { steps = 50, drift = 0.02 }";
    Section::new("parallel.every", words, |_| EverySpec::default(), keys).check(|every, c| {
        let Some(look) = every.look else { return };
        if every.drift.is_none() {
            let message = "`parallel.every.look` says after how many steps ranks look at their drift, and there is no bound on it";
            c.fault("look", message, "write a `drift`, such as drift = 0.02, or leave `look` out");
        } else if look + 1 >= every.steps {
            let message = format!(
                "`parallel.every.look` of {look} is too much for {} steps: what ranks see is heard one step later",
                every.steps
            );
            let hint = match every.steps.saturating_sub(2) {
                0 => "leave `drift` out".into(),
                most => format!("choose a look of at most {most}"),
            };
            c.fault("look", message, hint);
        }
    })
} }

section! { OuterSpec => {
    let keys = keys! { OuterSpec;
        /// the learning rate of the outer step
        lr: within(OUTER_LR) => |s| Some(&mut s.lr);
        /// the momentum of the outer step
        momentum: within(OUTER_MOMENTUM) => |s| Some(&mut s.momentum);
    };
    let words = "a table such as { lr = 0.7, momentum = 0.9 }";
    Section::new("parallel.outer", words, |_| OuterSpec::default(), keys)
} }

/// What ways to agree do not go together with.
pub(super) fn check(spec: &ParallelSpec, c: &Cursor) {
    spec.syncs().for_each(|sync| check_way(&ParallelSpec { sync, ..spec.clone() }, c));
}

fn check_way(spec: &ParallelSpec, c: &Cursor) {
    check_servers(spec, c);
    if spec.sync != SyncKind::Local {
        if !spec.own.is_empty() {
            let message = format!(
                "`parallel.own` names parameters that replicas keep for themselves, and with `sync = \"{}\"` they have all in common",
                spec.sync.name()
            );
            c.fault(
                "own",
                message,
                "write sync = \"local\", or own = []: a run that goes on starts from their mean",
            );
        }
        // A run that goes on with another way to agree has them from before.
        for key in
            ["every", "outer", "fragments", "overlap"].into_iter().filter(|key| c.has(key) && !c.has("sync"))
        {
            let message = format!("`parallel.{key}` is for replicas that take steps of their own");
            c.fault(key, message, format!("write sync = \"local\", or leave `{key}` out"));
        }
        return;
    }
    let refuse = |why: &str, hint: &str| c.fault("sync", format!("`parallel.sync = \"local\"` {why}"), hint);
    let one_out = "leave one of them out";
    if spec.reproducible {
        let why = "does not work with `reproducible`: what replicas learn by themselves depends on how many there are";
        refuse(why, one_out);
    }
    if spec.sync_batch_norm {
        let why = "does not work with `sync_batch_norm`, which needs all samples of a step at once";
        refuse(why, one_out);
    }
    for key in spec.splits() {
        let why =
            format!("works where each rank has the whole model and updates all of it, and not with `{key}`");
        refuse(&why, one_out);
    }
    let steps = spec.every.steps;
    if spec.fragments > 1 && spec.every.drift.is_some() {
        let why = "with `fragments` has a drift for each of them, and `every.drift` is a bound on all";
        refuse(why, "leave one of them out");
    }
    if spec.fragments > 1 && spec.fragments > steps {
        let message =
            format!("`parallel.fragments` of {} have no turn each within {steps} steps", spec.fragments);
        c.fault("fragments", message, format!("choose at most {steps}, or a larger `every`"));
    } else if spec.overlap * spec.fragments > steps {
        let message = format!(
            "`parallel.overlap` of {} steps is longer than from one of {} turns within {steps} steps to the next",
            spec.overlap, spec.fragments
        );
        c.fault("overlap", message, format!("choose at most {}", steps / spec.fragments));
    }
    if spec.fragments == 1 && spec.overlap > 0 {
        let message = "`parallel.overlap` is for parts of the model that are exchanged in turn";
        c.fault("overlap", message, "write fragments = 4, or leave `overlap` out");
    }
    if spec.balance == Balance::Auto {
        let why = "does not measure the speed of ranks, which `balance = \"auto\"` asks for";
        refuse(why, "leave `balance` out, or write one weight for each rank");
    }
    if let Some(key) = spec.open.names().first() {
        let why = format!(
            "works where each rank has the whole model, and `{key} = \"auto\"` asks for ways to split it"
        );
        refuse(&why, "leave `sync` out, or write numbers for the axes");
    }
}

/// What does not go together with `[train]`; `c` is in `[parallel]`.
pub(super) fn check_with(spec: &ParallelSpec, train: &TrainSpec, c: &Cursor) {
    spec.syncs().for_each(|sync| check_way_with(&ParallelSpec { sync, ..spec.clone() }, train, c));
}

fn check_way_with(spec: &ParallelSpec, train: &TrainSpec, c: &Cursor) {
    check_servers_with(spec, train, c);
    if spec.sync != SyncKind::Local {
        return;
    }
    let refuse = |why: &str, hint: &str| c.fault("sync", format!("`parallel.sync = \"local\"` {why}"), hint);
    if train.ema.is_some() {
        let why = "does not work with `train.ema`, which follows the weights of every step";
        refuse(why, "leave one of them out");
    }
    if train.precision == PrecisionKind::F16 {
        let why = "does not work with `train.precision = \"f16\"`: ranks find the scale of the loss together, in every step";
        refuse(why, "use precision = \"bf16\"");
    }
}

/// What parameter servers do not go together with.
fn check_servers(spec: &ParallelSpec, c: &Cursor) {
    // A run that goes on with another way to agree has these keys from before.
    let alone = |key: &str| c.has(key) && !c.has("sync");
    if spec.sync != SyncKind::PsBounded && alone("staleness") {
        let hint = "write sync = \"ps-bounded\", or leave `staleness` out";
        c.fault("staleness", "`parallel.staleness` says how far ranks may run ahead of each other", hint);
    }
    if !spec.sync.has_servers() {
        if alone("servers") {
            let hint = "write sync = \"ps\", \"ps-bounded\" or \"ps-async\", or leave `servers` out";
            c.fault("servers", "`parallel.servers` is for weights that servers hold", hint);
        }
        return;
    }
    let name = spec.sync.name();
    let refuse = |why: &str, hint: &str| c.fault("sync", format!("`parallel.sync = \"{name}\"` {why}"), hint);
    let one_out = "leave one of them out";
    if spec.reproducible && spec.sync != SyncKind::Ps {
        let why = "applies gradients as they come, and `reproducible` wants the same order every time";
        refuse(why, "leave one of them out; sync = \"ps\" and \"allreduce\" are reproducible");
    }
    if spec.sync_batch_norm {
        refuse("does not work with `sync_batch_norm`, which needs all samples of a step at once", one_out);
    }
    for key in spec.splits().chain(spec.wire.is_coded().then_some("wire")) {
        refuse(&format!("works where each rank has the whole model, and not with `{key}`"), one_out);
    }
    if let Balance::Auto | Balance::Given(_) = spec.balance {
        let why = "shares samples out equally, or as ranks come to them, and not by `balance`";
        refuse(why, "leave `balance` out");
    }
    if let Some(key) = spec.open.names().first() {
        let why = format!(
            "works where each rank has the whole model, and `{key} = \"auto\"` asks for ways to split it"
        );
        refuse(&why, "leave `sync` out, or write numbers for the axes");
    }
}

/// What of `[train]` parameter servers do not go together with.
fn check_servers_with(spec: &ParallelSpec, train: &TrainSpec, c: &Cursor) {
    if !spec.sync.has_servers() {
        return;
    }
    let name = spec.sync.name();
    let refuse = |why: &str, hint: &str| c.fault("sync", format!("`parallel.sync = \"{name}\"` {why}"), hint);
    if train.ema.is_some() {
        let why = "does not work with `train.ema`, which follows the weights of every step";
        refuse(why, "leave one of them out");
    }
    if let PrecisionKind::F16 | PrecisionKind::Auto = train.precision {
        let why = "does not work with `train.precision = \"f16\"` or \"auto\": ranks find the scale of the loss together";
        refuse(why, "use precision = \"f32\" or \"bf16\"");
    }
    if !train.optimizer.rule.by_element() {
        let why = format!(
            "does not work with the optimizer \"{}\", which needs whole tensors: servers hold parts of them",
            train.optimizer.kind()
        );
        refuse(&why, "choose \"adamw\" or \"sgd\"");
    }
    if train.optimizer.moments != DType::F32 {
        refuse("keeps the optimizer's state in f32", "leave `train.optimizer.moments` out");
    }
    if spec.sync == SyncKind::Ps && train.clip.is_some() {
        let why = "does not work with `train.clip`: no server has the sum of all gradients";
        refuse(why, "leave `clip` out; \"ps-async\" and \"ps-bounded\" clip each gradient by itself");
    }
}

impl ParallelSpec {
    /// With local steps: the most from one moment at which replicas have all weights in common to the next.
    pub fn steps_apart(&self) -> usize {
        let steps = self.every.steps;
        let rounds = if self.fragments == 1 { 1 } else { ROUNDS.min(EVERY_MAX as usize / steps).max(1) };
        steps * rounds
    }

    /// The ways in which replicas agree in the whole run: one, or two.
    pub fn syncs(&self) -> impl Iterator<Item = SyncKind> + use<> {
        let (first, then) = self.turn.map_or((self.sync, None), |turn| (turn.start, Some(turn.then)));
        [first].into_iter().chain(then)
    }

    /// Whether they do it in this way, at first or later.
    pub fn agrees_by(&self, kind: SyncKind) -> bool {
        self.syncs().any(|sync| sync == kind)
    }

    pub(super) fn sync_key(&self) -> Option<SyncChoice> {
        Some(self.turn.map_or(SyncChoice::Always(self.sync), SyncChoice::Turned))
    }

    pub(super) fn set_sync_key(&mut self, choice: SyncChoice) {
        (self.sync, self.turn) = match choice {
            SyncChoice::Always(kind) => (kind, None),
            SyncChoice::Turned(turn) => (turn.start, Some(turn)),
        };
    }

    /// The servers of so many ranks, if there are to be any. Where ranks come and go, there are no more servers than ranks, and one rank at
    /// least learns, also if it is alone and has to serve too.
    pub fn server_plan(&self, ranks: usize) -> Result<Option<ServerPlan>, String> {
        if !self.sync.has_servers() {
            return Ok(None);
        }
        let lockstep = self.sync == SyncKind::Ps;
        let plan = |servers: usize, serving: usize| Ok(Some(ServerPlan { servers, serving, lockstep }));
        let apart = |spec: ServingRanks, serving: usize| match spec.share && ranks - serving > serving {
            true => plan(ranks, serving),
            false => plan(serving.max(1), serving),
        };
        match (self.servers, self.elastic.is_some()) {
            (ServersSpec::Beside(servers), true) => plan(servers.min(ranks), 0),
            (ServersSpec::Beside(servers), false) if servers > ranks => {
                let hint = "a rank hosts one server at most; use fewer, or more ranks";
                Err(format!("`parallel.servers` of {servers} for {ranks} ranks: {hint}"))
            }
            (ServersSpec::Beside(servers), false) => plan(servers, 0),
            (ServersSpec::Apart(spec), true) => apart(spec, spec.ranks.min(ranks.saturating_sub(1))),
            (ServersSpec::Apart(spec), false) if spec.ranks >= ranks => Err(format!(
                "`parallel.servers` leaves no rank that learns: of {ranks}, {} only serve; start more ranks, or write fewer",
                spec.ranks
            )),
            (ServersSpec::Apart(spec), false) => apart(spec, spec.ranks),
        }
    }
}
