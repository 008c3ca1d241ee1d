//! The results as tables for people, with two columns.

use std::collections::BTreeMap;

use comfy_table::{Table, presets::NOTHING};

use super::{Changing, Doubled, FirstAnswers, Load, Propagation, Reconnect, Stalled, Start};
use crate::{enrolment::Quantiles, target::number};

/// Rows of name and value.
#[derive(Default)]
struct Rows(Vec<(String, String)>);

impl Rows {
    fn add(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.push((name.into(), value.into()));
    }

    fn quantiles(&mut self, name: &str, quantiles: Option<Quantiles>) {
        let value = quantiles.map(|Quantiles { p50, p99, max }| {
            format!("p50 {}, p99 {}, max {}", number(p50), number(p99), number(max))
        });
        self.add(name, value.unwrap_or_else(|| "not measured".to_owned()));
    }

    fn ready(&mut self, seconds: &BTreeMap<&'static str, f64>) {
        for (process, seconds) in seconds {
            self.add(format!("{process}: ready after, s"), number(*seconds));
        }
    }

    fn first_answers(&mut self, answers: &FirstAnswers) {
        self.add("every stream has its first answer after, s", number(answers.all_seconds));
        for (method, quantiles) in &answers.milliseconds {
            self.quantiles(&format!("{method}: first answer, ms"), Some(*quantiles));
        }
        self.add("connections and streams that were opened again", answers.retries.to_string());
    }

    /// `when` is empty or ends in a colon and a space.
    fn propagation(&mut self, when: &str, propagation: &Propagation) {
        let rate = number(propagation.changes_per_second);
        self.add(format!("{when}changes, and per second"), format!("{}, {rate}", propagation.changes));
        self.quantiles(&format!("{when}API server's answer to client, ms"), propagation.milliseconds);
        let missing = propagation.missing.map_or_else(String::new, |missing| format!(", {missing} missing"));
        let early = propagation.before_answer;
        self.add(format!("{when}arrivals"), format!("{}{missing}, {early} before the answer", propagation.arrivals));
        if propagation.failed_writes > 0 {
            let error = propagation.last_error.as_deref().unwrap_or_default();
            self.add(format!("{when}refused writes"), format!("{}: {error}", propagation.failed_writes));
        }
    }

    fn load(&mut self, load: &Load) {
        let messages = number(load.messages_per_second);
        self.add("messages, and per second", format!("{}, {messages}", load.messages));
        self.add("HTTP/2 data, MiB", number(mib(load.data_bytes)));
        for one in &load.processes {
            self.add(format!("{}: CPU, s", one.process), number(one.cpu_seconds));
            let memory =
                format!("{} to {}", number(mib(one.resident_bytes_before)), number(mib(one.resident_bytes_after)));
            self.add(format!("{}: resident, MiB", one.process), memory);
            let requests = one.api_requests.as_ref().map(|requests| {
                let methods = requests.methods.iter().map(|(method, count)| format!(", {method} {count}"));
                format!("{}{}; {} watches", requests.total, methods.collect::<String>(), requests.watches)
            });
            let requests = requests.unwrap_or_else(|| "not measured".to_owned());
            self.add(format!("{}: requests to the API server", one.process), requests);
        }
        self.add("bench itself: CPU, s", number(load.bench_cpu_seconds));
        self.add("duration, s", number(load.seconds));
        let busy = load.machine_busy.map_or_else(|| "not measured".to_owned(), |busy| number(busy * 100.0));
        self.add("all processors busy, %", busy);
        if load.lost_connections + load.ended_streams > 0 {
            let problem = load.last_problem.as_deref().unwrap_or_default();
            let value = format!("{} and {}: {problem}", load.lost_connections, load.ended_streams);
            self.add("connections lost and streams ended", value);
        }
    }

    fn table(self, title: &str) -> String {
        let mut table = Table::new();
        table.load_preset(NOTHING);
        table.set_header([title, ""]);
        self.0.into_iter().for_each(|(name, value)| {
            table.add_row([name, value]);
        });
        table.to_string()
    }
}

impl Start {
    /// As a table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut rows = Rows::default();
        rows.ready(&self.ready_seconds);
        rows.first_answers(&self.first_answers);
        for one in &self.opening.processes {
            rows.add(format!("{}: CPU per stream, us", one.process), number(one.cpu_us_per_stream));
            rows.add(format!("{}: memory per stream, bytes", one.process), number(one.resident_bytes_per_stream));
        }
        rows.load(&self.load);
        rows.table("start")
    }
}

impl Changing {
    /// As a table for people.
    #[must_use]
    pub fn table(&self, title: &str) -> String {
        let mut rows = Rows::default();
        rows.propagation("", &self.propagation);
        rows.load(&self.load);
        rows.table(title)
    }
}

impl Reconnect {
    /// As a table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut rows = Rows::default();
        rows.first_answers(&self.first_answers);
        rows.propagation("meanwhile: ", &self.meanwhile);
        rows.propagation("before, meanwhile and after: ", &self.around);
        for live in &self.live {
            rows.quantiles(&format!("{}: GET /live, ms", live.process), live.milliseconds);
            rows.add(
                format!("{}: GET /live, answers and failures", live.process),
                format!("{}, {}", live.answers, live.failures),
            );
        }
        rows.load(&self.load);
        rows.table("reconnect")
    }
}

impl Stalled {
    /// As a table for people.
    #[must_use]
    pub fn table(&self, title: &str) -> String {
        let mut rows = Rows::default();
        rows.add(format!("{title} clients"), self.clients.to_string());
        rows.add("messages that reached them", self.messages_to_them.to_string());
        rows.propagation("", &self.others);
        for one in &self.load.processes {
            let growth = one.growth_bytes() / f64::from(self.clients.max(1));
            rows.add(format!("{}: growth per {title} client, bytes", one.process), number(growth));
        }
        rows.load(&self.load);
        rows.table(title)
    }
}

impl Doubled {
    /// As a table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut rows = Rows::default();
        rows.ready(&self.ready_seconds);
        for (once, twice) in self.once.processes.iter().zip(&self.twice.processes) {
            let mut compare = |what: &str, once: f64, twice: f64| {
                let times = if once > 0.0 { format!(", {} times", number(twice / once)) } else { String::new() };
                rows.add(what, format!("{} to {}{times}", number(once), number(twice)));
            };
            let name = |what: &str| format!("{}: {what}", once.process);
            compare(&name("CPU per stream, us"), once.cpu_us_per_stream, twice.cpu_us_per_stream);
            let (once, twice) = (once.resident_bytes_per_stream, twice.resident_bytes_per_stream);
            compare(&name("memory per stream, bytes"), once, twice);
        }
        rows.load(&self.load);
        rows.table("doubled")
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control_plane::report::{Opening, ProcessOpening};

    fn load() -> Load {
        Load {
            seconds: 2.0,
            processes: Vec::new(),
            bench_cpu_seconds: 1.0,
            machine_busy: None,
            messages: 10,
            messages_per_second: 5.0,
            data_bytes: 1 << 20,
            lost_connections: 0,
            ended_streams: 1,
            last_problem: Some("status 5".to_owned()),
        }
    }

    fn opening(cpu_us_per_stream: f64) -> Opening {
        let one = ProcessOpening { process: "policy", streams: 9, cpu_us_per_stream, resident_bytes_per_stream: 0.0 };
        Opening { processes: vec![one] }
    }

    #[test]
    fn what_was_not_measured_is_absent_from_json_and_named_in_tables() {
        let propagation = Propagation {
            changes: 1,
            changes_per_second: 1.0,
            failed_writes: 0,
            last_error: None,
            arrivals: 0,
            missing: None,
            before_answer: 0,
            milliseconds: None,
        };
        let changing = Changing { propagation, load: load() };
        let json = serde_json::to_value(&changing).unwrap();
        assert!(json["propagation"].get("milliseconds").is_none() && json["load"].get("machine_busy").is_none());
        let table = changing.table("changes");
        assert!(table.contains("not measured") && table.contains("status 5"), "{table}");
    }

    #[test]
    fn doubled_objects_are_compared() {
        let ready_seconds = BTreeMap::new();
        let doubled = Doubled { ready_seconds, once: opening(10.0), twice: opening(15.0), load: load() };
        let table = doubled.table();
        assert!(table.contains("10.0 to 15.0, 1.50 times"), "{table}");
        assert!(table.contains("0 to 0\n") || table.contains("0 to 0 "), "{table}");
    }
}
