//! `polyreme launch`: the ranks of a job on several hosts.

use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches};

use super::ranks::{over, program};
use super::train::launch_elastic;
use super::{Cli, Command, CommandResult, Failure};
use crate::app::App;
use crate::cluster::launch::{LaunchOptions, explain, members, parse_hosts};
use crate::cluster::{crew, spawn};

/// Examples for `--help`.
const EXAMPLES: &str = "\
Examples:
  Two hosts, a rank each, and a third one with four:
    polyreme launch --hosts a,b,c:4 job.toml
  Over the network 10.1.0.0/16, as another user, with a key:
    polyreme launch --hosts a,b --interface 10.1.0.0/16 --user train --ssh 'ssh -i key' job.toml
  Ranks that may be lost; those that are lost are started again:
    polyreme launch --elastic --hosts a,b,c:4 job.toml
  Go on with a run:
    polyreme launch --hosts a,b resume runs/job

Each host needs this program, the job file and the data at the same paths (or see --binary and --dir), and an ssh that \
asks nothing: `ssh -o BatchMode=yes a true`. The run's folder is written by rank 0, on the first host. Ctrl-C stops all \
ranks after the step and saves. With --elastic this host needs the job file too, and the hosts have to reach it; the run's folder has \
to be one that all of them see.";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct LaunchArgs {
    /// The hosts, with the number of ranks if it is not one: `a,b,c:4`. Rank 0 is on the first.
    #[arg(long, value_name = "LIST")]
    hosts: String,
    /// The command that reaches a host, with its options.
    #[arg(long, value_name = "CMD", default_value = "ssh")]
    ssh: String,
    /// The name to log in with.
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// This program on the hosts [default: its path here, or else `polyreme` in the host's PATH].
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// The folder to work in, on every host [default: this one].
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
    /// The network that ranks use, as an interface's name or as a network: `eth1`, `10.1.0.0/16` [default: the address at
    /// which ssh reached the host].
    #[arg(long, value_name = "IFACE|CIDR")]
    interface: Option<String>,
    /// Let ranks be lost while training goes on, as `polyreme train --elastic`: the others go on, and a lost rank is started again, after
    /// 1 s and then after pauses that double up to a minute. This process coordinates them.
    #[arg(long)]
    elastic: bool,
    /// The job file and flags of `polyreme train`; or `resume RUN` and its flags.
    #[arg(value_name = "JOB.toml", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

pub(super) fn launch(app: &App, args: &LaunchArgs) -> CommandResult {
    let hosts = parse_hosts(&args.hosts).map_err(Failure::usage)?;
    let (rank_args, asked) = rank_args(app, &args.rest, args.elastic)?;
    let options = LaunchOptions {
        hosts,
        ssh: args.ssh.clone(),
        user: args.user.clone(),
        binary: args.binary.clone(),
        program: program()?,
        dir: match &args.dir {
            Some(dir) => dir.clone(),
            None => std::env::current_dir()?,
        },
        interface: args.interface.clone(),
        args: rank_args,
    };
    if options.ssh.trim().is_empty() {
        return Err(Failure::usage("--ssh is empty; leave it out, or give a command such as `ssh -p 2222`"));
    }
    match asked {
        Command::Train(asked) if asked.is_elastic() => return launch_elastic(app, &asked, options),
        Command::Resume(asked) if asked.is_elastic() => {
            return Err(Failure::usage(
                "`launch --elastic` begins runs; to go on with one, start `polyreme coordinator JOB.toml --listen ADDR:PORT \
                 --output RUN` on one host, and `polyreme join` on each",
            ));
        }
        _ => {}
    }
    let secret = spawn::random_secret()?;
    over(crew::run(members(&options), &secret, false)?, |lost| explain(lost, &options))
}

/// The arguments of each rank, and what they ask for: checked here first so that an error is reported once and before any login.
fn rank_args(app: &App, rest: &[String], elastic: bool) -> Result<(Vec<String>, Command), Failure> {
    let mut args = rest.to_vec();
    if !matches!(args.first().map(String::as_str), Some("train" | "resume")) {
        args.insert(0, "train".into());
    }
    if elastic && !args.iter().any(|arg| arg == "--elastic") {
        args.insert(1, "--elastic".into());
    }
    let words = std::iter::once(app.name().unwrap_or("polyreme").to_string()).chain(args.iter().cloned());
    match Cli::command().try_get_matches_from(words) {
        Err(error) => Err(Failure::said(error.exit_code(), &error.render().to_string())),
        Ok(matches) => {
            let asked = Cli::from_arg_matches(&matches);
            let asked =
                asked.map_err(|error| Failure::said(error.exit_code(), &error.render().to_string()))?;
            let (_, matches) = matches.subcommand().expect("the first word is one");
            let flag = ["ranks", "processes"].into_iter().find(|f| matches.value_source(f).is_some());
            match flag {
                Some(flag) => Err(Failure::usage(format!(
                    "--{flag} has no meaning under `launch`, where --hosts says how many ranks there are: a,b:4"
                ))),
                None => Ok((args, asked.command)),
            }
        }
    }
}
