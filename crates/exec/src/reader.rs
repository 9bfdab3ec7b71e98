//! The reader: runs a program, instruction by instruction. Training, evaluation and measurements all go through it; nothing is
//! done in a step that the program does not say.

use std::ops::Range;
use std::time::{Duration, Instant};

use polyreme_collective::servers::ServerClient;
use polyreme_collective::{CodedSum, Reduce, Ticket, Work};
use polyreme_graph::{Collective, Instr, Learning, Program, Region, totals};
use polyreme_kernels::Cx;
use polyreme_kernels::optim::{Optimizer, Rounding, StepHyper, clip_scale, sum_of_squares};
use polyreme_kernels::tally::Tally;

use crate::engine::{Engine, Loaded};
use crate::error::ExecError;
use crate::feed::{Counted, Feed, Inputs};
use crate::finite::NonFinite;
use crate::memory::MomentsMut;
use crate::moments;
use crate::vectors;

/// Makes the stream of random bits that round moments another one than those of initial values and dropout.
const ROUNDING: u64 = 0x6D6F_6D65_6E74_7331;

/// Programs reserve as many numbers for a tally as it has.
const _: () = assert!(Tally::NUMBERS == totals::TALLY);

/// What the caller gives a step, beside its microbatches.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepArgs {
    /// The learning rate.
    pub lr: f32,
    /// What the loss is multiplied by before it is differentiated; updates divide by it again.
    pub loss_scale: f32,
    /// Numbers of the caller, which are summed over the ranks.
    pub extra: [f64; 2],
}

impl Default for StepArgs {
    fn default() -> StepArgs {
        StepArgs { lr: 0.0, loss_scale: 1.0, extra: [0.0; 2] }
    }
}

/// The result of a step over all its microbatches and ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct Totals {
    /// The weighted mean of the loss.
    pub loss: f64,
    /// The sum of the microbatches' weights.
    pub weight: f64,
    /// The caller's numbers, summed over the ranks.
    pub extra: [f64; 2],
    /// The samples whose loss was counted, over the ranks.
    pub samples: Tally,
    /// The norm of the gradients before clipping, if they are clipped.
    pub grad_norm: Option<f64>,
    /// How long this rank waited for others.
    pub waited: Duration,
    /// Whether nothing was updated, because a scaled loss or its gradients are not finite. The same on all ranks.
    pub skipped: bool,
    /// Where a number that is not finite came from, if it is known and lies here.
    pub not_finite: Option<NonFinite>,
}

/// The progress of a step. Its vectors are kept from step to step: a steady step allocates nothing.
#[derive(Default)]
pub(crate) struct StepProgress {
    args: StepArgs,
    /// What each microbatch counts.
    counted: Vec<Counted>,
    /// For each exchange, the ticket while it is in flight.
    tickets: Vec<Option<(Ticket, Instant)>>,
    /// Of the whole step: the weighted loss, the weight and the caller's numbers; known after `judge`.
    totals: [f64; 4],
    /// Of the whole step: its samples.
    samples: Tally,
    pub(crate) grad_norm: Option<f64>,
    /// What clipping multiplies gradients by.
    clip: f32,
    waited: Duration,
    /// Whether nothing is updated.
    pub(crate) skipped: bool,
    /// By slot: the microbatch that was loaded into it last.
    pub(crate) in_slots: Vec<usize>,
    /// In a program of several steps: the step of the microbatch that runs, which random draws depend on. Microbatches of one step run
    /// before and after the end of another.
    pub(crate) drawn_at: Option<u64>,
    /// The first of several steps, and how many microbatches each has.
    first_step: Option<(u64, usize)>,
    /// The results of the steps before the last one of this program.
    earlier: Vec<Totals>,
    /// How many steps follow the present one.
    steps_left: usize,
    /// Whether this rank has left the steps that it takes by itself before the last of them.
    left: bool,
    /// The loss of an earlier step, if it was not finite.
    late: Option<f64>,
    /// Bytes that steps of training have sent, all of them together.
    sent_bytes: u64,
    /// Whether this rank's own samples gave a loss that is not finite, and where it came from.
    not_finite: Option<Option<NonFinite>>,
}

impl StepProgress {
    fn begin(&mut self, loaded: &Loaded, args: StepArgs) {
        let program = &loaded.program;
        self.counted.clear();
        self.counted.resize(program.microbatches.len(), Counted::default());
        self.tickets.clear();
        self.tickets.resize(program.exchanges.len(), None);
        self.in_slots.clear();
        self.in_slots.resize(program.slots, 0);
        (self.args, self.totals, self.clip) = (args, [0.0, 1.0, 0.0, 0.0], 1.0);
        self.samples = Tally::default();
        (self.grad_norm, self.waited, self.not_finite, self.skipped) = (None, Duration::ZERO, None, false);
        self.earlier.clear();
        self.steps_left = program.instrs.iter().filter(|instr| matches!(instr, Instr::NextStep)).count();
        (self.drawn_at, self.first_step, self.late, self.left) = (None, None, None, false);
    }
}

impl StepProgress {
    /// Whether nothing is updated, because the step is skipped or has failed.
    pub(crate) fn keeps_weights(&self) -> bool {
        self.skipped || self.late.is_some()
    }

    /// Whether this rank's own samples gave a loss that is not finite.
    pub(crate) fn has_non_finite(&self) -> bool {
        self.not_finite.is_some()
    }

    /// The results of the step that was judged last.
    fn totals(&self, not_finite: Option<NonFinite>) -> Totals {
        let StepProgress { totals: [loss, weight, a, b], samples, grad_norm, waited, skipped, .. } = *self;
        Totals { loss: loss / weight, weight, extra: [a, b], samples, grad_norm, waited, skipped, not_finite }
    }
}

/// Whether an instruction reads or changes parameters and what is learnt with them, after all sums of a step.
fn changes_learnt(instr: &Instr) -> bool {
    matches!(instr, Instr::Measure { .. } | Instr::Update { .. } | Instr::Outer { .. } | Instr::Follow { .. })
}

impl Engine {
    /// Runs the selected program. One that updates parameters counts as a step.
    ///
    /// If the loss over all ranks is not finite, all ranks get an error and nothing is updated. In a program that scales the
    /// loss it is no error: the step is skipped, as it is when gradients are not finite.
    pub fn step_with<E: From<ExecError>>(
        &mut self,
        feed: &mut dyn Feed<E>,
        args: StepArgs,
    ) -> Result<Totals, E> {
        let loaded = self.loaded();
        self.progress.begin(&loaded, args);
        self.memory.params_from = None;
        if self.progress.steps_left > 0 {
            let per_step = loaded.program.microbatches.len() / (self.progress.steps_left + 1);
            self.progress.first_step = Some((self.memory.state.step, per_step));
        }
        // Ranks evaluate at their own pace: only what trains moves a group to its next step.
        if let (Some(group), true) = (&mut self.group, loaded.program.optimizer.is_some()) {
            group.comms.set_step(self.memory.state.step);
        }
        let called = self.group.as_ref().map_or(0, |group| group.comms.n_calls());
        if let (Some(client), false) = (&mut self.servers, loaded.program.served.is_empty()) {
            client.begin(self.memory.state.step);
        }
        let (entered, step, sent) = (self.clock(), self.step_number(&loaded), self.sent_bytes());
        let mut n_left_out = 0;
        for instr in &loaded.program.instrs {
            if self.progress.left && !matches!(instr, Instr::Together) {
                n_left_out += usize::from(matches!(instr, Instr::Start(_)));
                continue;
            }
            let began = self.clock();
            if self.arrival.is_some() && changes_learnt(instr) {
                self.arrive()?;
            }
            self.read(&loaded, instr, feed)?;
            self.note_instr(&loaded, instr, began);
        }
        if loaded.program.optimizer.is_some() {
            // A step that is skipped changes nothing.
            self.arrive()?;
        }
        self.note_program(&loaded, step, entered);
        // No communication happens that the program does not list.
        let called = self.group.as_ref().map_or(0, |group| group.comms.n_calls()) - called;
        debug_assert_eq!(
            called as usize + n_left_out,
            loaded.program.exchanges.len(),
            "exchanges that were made and listed"
        );
        if let (Some(client), false) = (&mut self.servers, loaded.program.served.is_empty()) {
            client.end();
        }
        if loaded.program.optimizer.is_some() {
            self.memory.state.step += 1;
            self.progress.sent_bytes += self.sent_bytes().saturating_sub(sent);
        }
        self.progress.drawn_at = None;
        let not_finite = self.progress.not_finite.take().flatten();
        Ok(self.progress.totals(not_finite))
    }

    /// Bytes that this rank has sent in steps of training, over whatever connects ranks that do not share memory; 0 under MPI,
    /// which does not say.
    pub fn wire_bytes(&self) -> u64 {
        self.progress.sent_bytes
    }

    /// Bytes that this rank has sent in all its groups.
    fn sent_bytes(&self) -> u64 {
        let by_workers = self.servers.as_ref().map_or(0, ServerClient::sent_bytes);
        self.group.as_ref().map_or(0, |group| group.comms.sent_bytes()) + by_workers
    }

    /// The results of the earlier steps of a program of several, in their order; the last one's are what it returned.
    pub fn earlier_steps(&self) -> &[Totals] {
        &self.progress.earlier
    }

    fn read<E: From<ExecError>>(
        &mut self,
        loaded: &Loaded,
        instr: &Instr,
        feed: &mut dyn Feed<E>,
    ) -> Result<(), E> {
        match instr {
            Instr::Begin(of) => {
                let totals = self.memory.region::<f64>(loaded, &self.bodies, of);
                let (sums, extra) = totals.split_at_mut(totals::given(totals.len()).start);
                sums.fill(0.0);
                extra.copy_from_slice(&self.progress.args.extra);
            }
            Instr::Load { slot, microbatch } => self.load(loaded, *slot, *microbatch, feed)?,
            Instr::Run { block, slot, microbatch } => self.run_block(loaded, *block, *slot, *microbatch)?,
            Instr::Count { slot, microbatch, into, tally } => {
                self.count(loaded, (*slot, *microbatch), into, tally)?;
            }
            Instr::Keep { slot, microbatch, nodes } => self.keep(loaded, *slot, *microbatch, nodes),
            Instr::WeighStates { slot, microbatch, into } => {
                self.weigh_states(loaded, *slot, *microbatch, into);
            }
            Instr::Zero(of) => self.zero(loaded, of),
            Instr::PutBack { .. } if !self.progress.skipped => {}
            Instr::Copy { from, into } | Instr::PutBack { from, into } => {
                let cx = Cx { isa: self.options.isa, par: &*self.pool };
                let (from, into) = self.memory.two_regions::<f32, f32>(loaded, &self.bodies, [from, into]);
                vectors::copy(&cx, into, from);
            }
            Instr::Add { from, into } => {
                let cx = Cx { isa: self.options.isa, par: &*self.pool };
                let (from, into) = self.memory.two_regions(loaded, &self.bodies, [from, into]);
                vectors::add(&cx, into, from);
            }
            Instr::Subtract { from, into } => {
                let cx = Cx { isa: self.options.isa, par: &*self.pool };
                let (from, into) = self.memory.two_regions(loaded, &self.bodies, [from, into]);
                vectors::subtract(&cx, into, from);
            }
            Instr::DivideByWeight(of) => {
                let weight = self.progress.totals[1];
                let of = self.memory.region::<f32>(loaded, &self.bodies, of);
                of.iter_mut().for_each(|x| *x = (f64::from(*x) / weight) as f32);
            }
            Instr::Divide { of, by } => {
                let of = self.memory.region::<f32>(loaded, &self.bodies, of);
                of.iter_mut().for_each(|x| *x /= *by as f32);
            }
            Instr::Start(exchange) => self.start(loaded, *exchange),
            Instr::Wait(exchange) => self.wait(loaded, *exchange)?,
            Instr::Push(range) => self.push_range(loaded, *range)?,
            Instr::Pull(range) => self.pull_range(loaded, *range)?,
            Instr::Await(range) => {
                let began = Instant::now();
                self.await_range(loaded, *range)?;
                self.progress.waited += began.elapsed();
            }
            Instr::Judge(of) => self.judge(loaded, of)?,
            Instr::JudgeOwn(of) => {
                let numbers = self.memory.region::<f64>(loaded, &self.bodies, of);
                (self.progress.totals, self.progress.samples) = read_totals(numbers);
                let [loss, ..] = self.progress.totals;
                if !loss.is_finite() {
                    self.progress.late = self.progress.late.or(Some(loss));
                }
            }
            Instr::JudgeSteps(of) => self.judge_steps(loaded, of)?,
            Instr::Squares { of, into, block } => {
                let cx = Cx { isa: self.options.isa, par: &*self.pool };
                let (grads, squares) = self.memory.two_regions::<f32, f64>(loaded, &self.bodies, [of, into]);
                match block {
                    None => squares[0] += sum_of_squares(&cx, grads),
                    Some(block) => vectors::squares_by_block(&cx, grads, *block, squares),
                }
            }
            Instr::SquaresApart { of, from, into } => {
                let cx = Cx { isa: self.options.isa, par: &*self.pool };
                let (of, from) = self.memory.two_regions::<f32, f32>(loaded, &self.bodies, [of, from]);
                let squares = vectors::squares_apart(&cx, of, from);
                self.memory.region::<f64>(loaded, &self.bodies, into)[0] += squares;
            }
            Instr::Leave { movement, drift } => {
                let movement = self.memory.region::<f64>(loaded, &self.bodies, movement);
                // Of what is no number all ranks find out together.
                let is_near = (movement[0] / movement[1]).sqrt() <= *drift;
                self.progress.left = !is_near;
            }
            Instr::Together => self.progress.left = false,
            Instr::Clip { squares, max_norm } => {
                let squares: f64 = self.memory.region::<f64>(loaded, &self.bodies, squares).iter().sum();
                let norm =
                    squares.sqrt() / self.progress.totals[1] / f64::from(self.progress.args.loss_scale);
                self.progress.skipped |= loaded.program.scaled && !norm.is_finite();
                (self.progress.grad_norm, self.progress.clip) = (Some(norm), clip_scale(norm, *max_norm));
            }
            Instr::Measure { .. } | Instr::Update { .. } | Instr::Follow { .. }
                if self.progress.keeps_weights() => {}
            Instr::Measure { what, params, grads, sums } => {
                let optimizer = loaded.program.optimizer.ok_or(ExecError::NoOptimizer)?;
                let hyper = self.hyper();
                let cx = Cx { isa: self.options.isa, par: &*self.pool };
                let range = (params.start, params.len());
                let moments = moments::of_update(&optimizer, &self.memory.state.lengths, params, 0);
                let r = self.memory.update(loaded, &self.bodies, range, grads, moments, Some(sums));
                let tensors = within(&self.updated.split, params, |t| t.part.range.start);
                let MomentsMut::F32(states) = r.moments else {
                    unreachable!("moments of whole tensors are f32, or refused")
                };
                optimizer.measure(*what, &cx, hyper, (r.params, r.grads), states, tensors, r.sums);
            }
            Instr::Update { params, grads, moments_at, sums, learning } => {
                let Some(optimizer) = loaded.program.optimizer else {
                    return Err(ExecError::NoOptimizer.into());
                };
                let (optimizer, hyper) = self.rule(optimizer, learning);
                let cx = Cx { isa: self.options.isa, par: &*self.pool };
                let range = (params.start, params.len());
                let rounding = self.rounding(params.start);
                let moments = moments::of_update(&optimizer, &self.memory.state.lengths, params, *moments_at);
                let r = self.memory.update(loaded, &self.bodies, range, grads, moments, sums.as_ref());
                let whole = within(&self.updated.whole, params, |t| t.range.start);
                let split = within(&self.updated.split, params, |t| t.part.range.start);
                assert!(
                    split.is_empty() || sums.is_some(),
                    "parts of tensors are updated by sums of all parts"
                );
                match r.moments {
                    MomentsMut::F32([m, v]) => {
                        optimizer.step(&cx, hyper, r.params, r.grads, m, v, whole);
                        optimizer.step_split(&cx, hyper, r.params, r.grads, [m, v], split, r.sums);
                    }
                    MomentsMut::Bf16([m, v]) => {
                        optimizer.step_half(&cx, hyper, rounding, r.params, r.grads, m, v);
                    }
                }
            }
            Instr::Outer { of, params, from, lr, momentum } => {
                let cx = Cx { isa: self.options.isa, par: &*self.pool };
                let (mean, from, velocity) = self.memory.outer(loaded, &self.bodies, [of, from], params);
                vectors::outer(&cx, mean, from, velocity, [*lr as f32, *momentum as f32]);
            }
            Instr::ReadParams(from) => {
                self.memory.params_from = match from {
                    Region::Buffer(buffer, _) => Some(loaded.buffers[*buffer]),
                    Region::Params(_) => None,
                    Region::Grads(_)
                    | Region::States(_)
                    | Region::Residual(_)
                    | Region::Factors(_)
                    | Region::Value { .. } => {
                        unreachable!("parameters are read from their arena or from a copy of it")
                    }
                };
            }
            Instr::NextStep => {
                // What is not finite may be of a later step, whose microbatches have begun.
                let totals = self.progress.totals(None);
                self.progress.earlier.push(totals);
                self.progress.steps_left -= 1;
                self.memory.state.step += 1;
                if let Some(args) = feed.args(self.progress.earlier.len()) {
                    self.progress.args = args;
                }
            }
            Instr::Follow { decay } => {
                let share = 1.0 - warm_decay(*decay, self.memory.state.step + 1);
                let cx = Cx { isa: self.options.isa, par: &*self.pool };
                let (params, average) = self.memory.state.params_and_average();
                vectors::follow(&cx, average, params, share);
            }
        }
        Ok(())
    }

    fn load<E: From<ExecError>>(
        &mut self,
        loaded: &Loaded,
        slot: usize,
        microbatch: usize,
        feed: &mut dyn Feed<E>,
    ) -> Result<(), E> {
        let body = loaded.bodies[loaded.program.microbatches[microbatch].body];
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        self.memory.set_constants(ready, slot);
        let mut inputs = Inputs { memory: &mut self.memory, ready, slot };
        let counted = feed.load(microbatch, &mut inputs)?;
        if inputs.has("weight") {
            inputs.f32("weight")?[0] = (counted.weight * f64::from(self.progress.args.loss_scale)) as f32;
        }
        self.progress.counted[microbatch] = counted;
        self.progress.in_slots[slot] = microbatch;
        Ok(())
    }

    fn run_block(
        &mut self,
        loaded: &Loaded,
        number: usize,
        slot: usize,
        microbatch: usize,
    ) -> Result<(), ExecError> {
        let block = &loaded.program.blocks[number];
        let body = loaded.bodies[block.body];
        let first_sample = loaded.program.microbatches[microbatch].first_sample as u64;
        let entered = self.pace.is_some().then(Instant::now);
        let step_of = |(first, per_step): (u64, usize)| first + (microbatch / per_step) as u64;
        self.progress.drawn_at = self.progress.first_step.map(step_of);
        for node in block.nodes.clone() {
            let began = self.clock();
            match block.update {
                Some(param) => self.apply(loaded, body, slot, node, param),
                None => self.run_node(body, slot, node, first_sample)?,
            }
            self.note_node(loaded, number, node, microbatch, began);
        }
        if let (Some(entered), Some(pace)) = (entered, &self.pace) {
            let least = pace.of(&loaded.program.bodies[block.body], block);
            std::thread::sleep(least.saturating_sub(entered.elapsed()));
        }
        Ok(())
    }

    /// Adds the loss of a microbatch to the step's. If it is not finite, finds its cause while the inputs are still there.
    fn count(
        &mut self,
        loaded: &Loaded,
        (slot, microbatch): (usize, usize),
        into: &Region,
        tally: &Region,
    ) -> Result<(), ExecError> {
        let body = loaded.bodies[loaded.program.microbatches[microbatch].body];
        let Counted { weight, samples } = self.progress.counted[microbatch];
        let loss = f64::from(self.output_of(body, slot, "loss")?[0]);
        let sums = self.memory.region::<f64>(loaded, &self.bodies, into);
        sums[0] += weight * loss;
        sums[1] += weight;
        let tally = self.memory.region::<f64>(loaded, &self.bodies, tally);
        // Modulo 2¹²⁸ on each rank, so that the sum over ranks is exact however many microbatches there are.
        tally.copy_from_slice(&(Tally::of_numbers(tally) + samples).to_numbers());
        if !loss.is_finite() && self.progress.not_finite.is_none() {
            let first_sample = loaded.program.microbatches[microbatch].first_sample as u64;
            self.progress.not_finite = Some(self.find_non_finite_in(body, slot, first_sample)?);
        }
        Ok(())
    }

    fn keep(&mut self, loaded: &Loaded, slot: usize, microbatch: usize, nodes: &Range<usize>) {
        let body = loaded.bodies[loaded.program.microbatches[microbatch].body];
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        let graph = &ready.body.graph;
        for &(state, value) in &graph.updates {
            if nodes.contains(&graph.value(value).producer.idx()) {
                self.memory.copy(ready, slot, value, graph.states[state].value);
            }
        }
    }

    fn weigh_states(&mut self, loaded: &Loaded, slot: usize, microbatch: usize, into: &Region) {
        let weight = self.progress.counted[microbatch].weight as f32;
        let ready = self.bodies[loaded.bodies[loaded.program.microbatches[microbatch].body]].as_ref();
        let ready = ready.expect("bodies of a program stay with it");
        let all = Region::States(0..self.memory.state.lengths.states);
        let (now, to) = self.memory.two_regions::<f32, f32>(loaded, &self.bodies, [&all, into]);
        to.copy_from_slice(now);
        for &(state, value) in &ready.body.graph.updates {
            let polyreme_graph::Place::State(at) =
                ready.plan.places[ready.body.graph.states[state].value.idx()]
            else {
                unreachable!("states lie in their own arena")
            };
            let new = Region::Value { slot, body: loaded.program.microbatches[microbatch].body, value };
            let to = match into {
                Region::Buffer(buffer, r) => {
                    Region::Buffer(*buffer, r.start + at..r.start + at + loaded.program.len_of(&new))
                }
                _ => unreachable!("weighted states go into a buffer"),
            };
            let (new, to) = self.memory.two_regions::<f32, f32>(loaded, &self.bodies, [&new, &to]);
            to.copy_from_slice(new);
        }
        let to = self.memory.region::<f32>(loaded, &self.bodies, into);
        to.iter_mut().for_each(|s| *s *= weight);
    }

    fn zero(&mut self, loaded: &Loaded, of: &Region) {
        match loaded.program.dtype(of) {
            polyreme_graph::DType::F64 => self.memory.region::<f64>(loaded, &self.bodies, of).fill(0.0),
            _ => self.memory.region::<f32>(loaded, &self.bodies, of).fill(0.0),
        }
    }

    /// Hands elements to an exchange.
    fn start(&mut self, loaded: &Loaded, number: usize) {
        let exchange = &loaded.program.exchanges[number];
        let span = |region: &Region| self.memory.span(loaded, &self.bodies, region);
        let work = match &exchange.op {
            Collective::AllReduce | Collective::ReduceScatter(_) if exchange.coding.is_some() => {
                let coding = exchange.coding.as_ref().expect("asked above");
                Work::CodedSum(CodedSum {
                    span: span(&exchange.of),
                    layout: coding.layout.clone(),
                    residual: span(&coding.residual),
                    coded: span(&coding.coded),
                    factors: coding.factors.as_ref().map(span),
                    scattered: matches!(exchange.op, Collective::ReduceScatter(_)),
                    isa: self.options.isa,
                })
            }
            Collective::AllReduce => Work::AllReduce(span(&exchange.of), Reduce::Sum),
            Collective::ReduceScatter(cuts) => {
                Work::ReduceScatter(span(&exchange.of), cuts.clone(), Reduce::Sum)
            }
            Collective::AllGather(cuts) => Work::AllGather(span(&exchange.of), cuts.clone()),
            &Collective::Send { to, tag } => Work::Send { to, tag, span: span(&exchange.of) },
            &Collective::Receive { from, tag } => Work::Receive { from, tag, span: span(&exchange.of) },
            // Done at the wait: there is no compute to overlap it with.
            Collective::AllToAll { .. } | Collective::Meet => return,
        };
        let group = self.group.as_mut().expect("a program with exchanges is run by an engine that joined");
        // SAFETY: the program does not touch these elements before it waits, and their memory outlives the group.
        let ticket = unsafe { group.comms.along(exchange.axis).start(work) };
        self.progress.tickets[number] = Some((ticket, Instant::now()));
    }

    fn wait(&mut self, loaded: &Loaded, number: usize) -> Result<(), ExecError> {
        let began = Instant::now();
        let group = self.group.as_mut().expect("a program with exchanges is run by an engine that joined");
        let ticket = self.progress.tickets[number].take();
        let exchange = &loaded.program.exchanges[number];
        let comm = group.comms.along(exchange.axis);
        match (&exchange.op, ticket) {
            (Collective::Meet, _) => comm.barrier()?,
            (Collective::AllToAll { send, into, recv }, _) => {
                let [from, into] = [&exchange.of, into].map(|r| self.memory.span(loaded, &self.bodies, r));
                // SAFETY: a program names two regions that do not overlap, and `&mut self` is held until it returns.
                unsafe { comm.all_to_all_spans(from, send, into, recv)? };
            }
            (_, Some((ticket, _))) => comm.wait(ticket)?,
            (_, None) => unreachable!("exchange {number} is waited for before it is started"),
        }
        self.progress.waited += began.elapsed();
        self.note_exchange(loaded, number, ticket.map(|(_, started)| started));
        Ok(())
    }

    /// Records the totals of the step; an error if the loss is not finite.
    fn judge(&mut self, loaded: &Loaded, of: &Region) -> Result<(), ExecError> {
        let numbers = self.memory.region::<f64>(loaded, &self.bodies, of);
        (self.progress.totals, self.progress.samples) = read_totals(numbers);
        let loss = self.progress.late.unwrap_or(self.progress.totals[0]);
        if loss.is_finite() {
            return Ok(());
        }
        if self.progress.steps_left > 0 {
            // Stages are at different places, and wait for each other: the run goes on to its end, where all are done.
            self.progress.late = Some(loss);
            return Ok(());
        }
        if loaded.program.scaled {
            self.progress.skipped = true;
            return Ok(());
        }
        self.fail_not_finite(loaded, loss)
    }

    /// Records the totals of all steps of a program that were made, over all ranks; an error if the loss of one is not finite.
    fn judge_steps(&mut self, loaded: &Loaded, of: &Region) -> Result<(), ExecError> {
        let numbers = self.memory.region::<f64>(loaded, &self.bodies, of);
        let progress = &mut self.progress;
        let mut first_bad = None;
        let n_done = progress.earlier.len() + 1;
        for (step, numbers) in numbers.chunks_exact(totals::len(1)).take(n_done).enumerate() {
            let (sums, samples) = read_totals(numbers);
            let [loss, weight, a, b] = sums;
            if !loss.is_finite() {
                first_bad = first_bad.or(Some(loss));
            }
            match progress.earlier.get_mut(step) {
                Some(earlier) => {
                    (earlier.loss, earlier.weight, earlier.samples) = (loss / weight, weight, samples);
                    earlier.extra = [a, b];
                }
                None => (progress.totals, progress.samples) = (sums, samples),
            }
        }
        first_bad.map_or(Ok(()), |loss| self.fail_not_finite(loaded, loss))
    }

    /// The error of a loss that is not finite, when nothing is under way any more.
    fn fail_not_finite(&mut self, loaded: &Loaded, loss: f64) -> Result<(), ExecError> {
        // Exchanges in flight work on this engine's memory.
        if let Some(group) = &mut self.group {
            for (number, ticket) in self.progress.tickets.iter_mut().enumerate() {
                if let Some((ticket, _)) = ticket.take() {
                    group.comms.along(loaded.program.exchanges[number].axis).wait(ticket)?;
                }
            }
        }
        let (here, place) = match self.progress.not_finite.take() {
            Some(place) => (true, place),
            None => (false, None),
        };
        Err(ExecError::NotFinite { loss, here, place })
    }

    /// The hyperparameters of this step's updates; needs the totals.
    pub(crate) fn hyper(&self) -> StepHyper {
        let StepProgress { args, totals, clip, .. } = &self.progress;
        let grad_scale = (1.0 / totals[1]) as f32 * clip / args.loss_scale;
        StepHyper { lr: args.lr, step: self.memory.state.step + 1, grad_scale, decay_scale: 1.0 }
    }

    /// What this rank's samples weigh in the step, or with logical shards those of all ranks; and what gradients are multiplied by beside that.
    pub(crate) fn pushed_weight(&self, program: &Program) -> (f64, f64) {
        let StepProgress { args, counted, clip, totals, .. } = &self.progress;
        let weight = match program.role.as_ref().and_then(|role| role.shards) {
            Some(_) => totals[1],
            None => counted.iter().map(|c| c.weight).sum(),
        };
        (weight, f64::from(clip / args.loss_scale))
    }

    /// The rule and the hyperparameters for parameters that are learnt so.
    pub(crate) fn rule(&self, optimizer: Optimizer, learning: &Learning) -> (Optimizer, StepHyper) {
        let hyper = self.hyper();
        let lr = (f64::from(hyper.lr) * learning.lr_scale) as f32;
        let optimizer = learning.weight_decay.map_or(optimizer, |decay| optimizer.with_weight_decay(decay));
        (optimizer, StepHyper { lr, ..hyper })
    }

    /// Where the random bits come from that round the moments of the parameters from `first` on.
    pub(crate) fn rounding(&self, first: usize) -> Rounding {
        Rounding { key: self.options.seed ^ ROUNDING, step: self.memory.state.step + 1, first: first as u64 }
    }
}

/// Weighted loss, weight and the caller's numbers of a step's totals, and its samples.
fn read_totals(numbers: &[f64]) -> ([f64; 4], Tally) {
    let part = |range: Range<usize>| &numbers[range];
    let (pairs, extra) = (part(totals::pairs(numbers.len())), part(totals::given(numbers.len())));
    let sum = |k: usize| pairs.iter().skip(k).step_by(2).sum::<f64>();
    ([sum(0), sum(1), extra[0], extra[1]], Tally::of_numbers(part(totals::tally(numbers.len()))))
}

/// The tensors that begin inside a range of the parameters.
fn within<'a, T>(tensors: &'a [T], params: &Range<usize>, start: impl Fn(&T) -> usize) -> &'a [T] {
    let before = |at: usize| tensors.partition_point(|t| start(t) < at);
    &tensors[before(params.start)..before(params.end)]
}

/// The decay of averages at step `t`: at first they follow more quickly, `min(decay, (1 + t) / (10 + t))`.
fn warm_decay(decay: f64, steps_done: u64) -> f32 {
    let t = steps_done as f64;
    decay.min((1.0 + t) / (10.0 + t)) as f32
}
