//! Slurm's short way to write many hosts: `node[1-3,7],login` is node1, node2, node3, node7 and login.

use super::EnvError;

/// More hosts than any cluster has; a longer list is a mistake.
const HOSTS_MAX: usize = 1 << 16;
/// The longest host name.
const NAME_BYTES_MAX: usize = 255;

/// The hosts of a list, in its order. Numbers keep their leading zeros; a name may have several brackets.
pub fn expand(list: &str) -> Result<Vec<String>, EnvError> {
    let wrong = |why: &'static str| EnvError::Nodes { list: list.to_owned(), why };
    let mut hosts = Vec::new();
    for part in split(list).map_err(wrong)? {
        let names = product(part).map_err(wrong)?;
        if hosts.len() + names.len() > HOSTS_MAX {
            return Err(wrong("it has too many hosts"));
        }
        hosts.extend(names);
    }
    Ok(hosts)
}

/// At commas outside brackets.
fn split(list: &str) -> Result<Vec<&str>, &'static str> {
    let mut parts = Vec::new();
    let (mut start, mut inside) = (0, false);
    for (at, c) in list.char_indices() {
        match c {
            '[' if inside => return Err("a bracket within a bracket"),
            ']' if !inside => return Err("a bracket that was not opened"),
            '[' | ']' => inside = c == '[',
            ',' if !inside => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("a bracket that is not closed");
    }
    parts.push(&list[start..]);
    Ok(parts)
}

/// One name with any number of brackets: every choice in each of them, the last one running fastest.
fn product(part: &str) -> Result<Vec<String>, &'static str> {
    let mut names = vec![String::new()];
    let mut rest = part.trim();
    if rest.is_empty() {
        return Err("a host without a name");
    }
    while !rest.is_empty() {
        let (plain, bracket) = rest.split_once('[').unwrap_or((rest, ""));
        names.iter_mut().for_each(|name| name.push_str(plain));
        let Some((inside, after)) = bracket.split_once(']') else { break };
        let choices = ranges(inside, HOSTS_MAX / names.len())?;
        names = names
            .iter()
            .flat_map(|name| choices.iter().map(move |choice| format!("{name}{choice}")))
            .collect();
        rest = after;
    }
    if names.iter().any(|name| name.len() > NAME_BYTES_MAX) {
        return Err("a name that is too long");
    }
    Ok(names)
}

/// `1-3,07` as numbers with their leading zeros.
fn ranges(inside: &str, n_max: usize) -> Result<Vec<String>, &'static str> {
    let mut choices = Vec::new();
    for range in inside.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
            true => text.parse::<u64>().map_err(|_| "not a number in brackets"),
            false => Err("not a number in brackets"),
        };
        let (low, high) = (number(first)?, number(last)?);
        if high < low {
            return Err("a range that ends before it begins");
        }
        if high - low >= n_max.saturating_sub(choices.len()) as u64 {
            return Err("it has too many hosts");
        }
        let width = first.len().min(NAME_BYTES_MAX);
        choices.extend((low..=high).map(|n| format!("{n:0width$}")));
    }
    Ok(choices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_their_hosts() {
        let check = |list: &str, hosts: &str| assert_eq!(expand(list).unwrap().join(" "), hosts, "{list}");
        check("a", "a");
        check("a,b-c.example", "a b-c.example");
        check("node[1-3,7]", "node1 node2 node3 node7");
        check("n[08-11],x", "n08 n09 n10 n11 x");
        check("n[1]-ib,x[2-3]", "n1-ib x2 x3");
        check("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2");
        check("n[099-101]", "n099 n100 n101");
        assert_eq!(expand("n[1-65536]").unwrap().len(), 65536);
    }

    #[test]
    fn what_is_no_list_is_refused_before_it_grows() {
        let check = |list: &str, why: &str| {
            let e = expand(list).expect_err(list).to_string();
            assert!(e.contains(why), "{list}: {e}");
        };
        check("", "a host without a name");
        check("a,,b", "a host without a name");
        check("a[1-3", "not closed");
        check("a1-3]", "not opened");
        check("a[[1]]", "within a bracket");
        check("a[]", "not a number");
        check("a[1-]", "not a number");
        check("a[x]", "not a number");
        check("a[+1]", "not a number");
        check("a[3-1]", "ends before it begins");
        check("a[1-99999999999999999999]", "not a number");
        check("a[0-18446744073709551615]", "too many hosts");
        check("a[1-60000],b[1-60000]", "too many hosts");
        check("a[1-300]b[1-300]", "too many hosts");
        check(&"a".repeat(300), "too long");
    }
}
